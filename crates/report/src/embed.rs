//! Self-contained pages with scripts: inline data and code under a content security policy that blocks everything else.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::svg::escape;

/// Bytes as base64.
pub fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Serializes a value as JSON for a `<script type="application/json">`. `<` and characters that are special in XML are escaped.
pub fn json_for_script(value: &impl Serialize) -> String {
    let text = serde_json::to_string(value).expect("strings, numbers and lists are always valid JSON");
    text.replace('<', "\\u003c").replace('&', "\\u0026").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

/// A self-contained HTML file with inline style, data and scripts. Its content security policy allows only these scripts and this style, by hash,
/// and no requests.
#[derive(Clone, Debug, Default)]
pub struct ScriptedPage<'a> {
    /// The page title.
    pub title: &'a str,
    /// The body as HTML.
    pub body: &'a str,
    /// The style sheet.
    pub style: &'a str,
    /// JSON that the scripts read from the element with the id `data`; made by [`json_for_script`].
    pub data: &'a str,
    /// Scripts, run in order after the body is parsed.
    pub scripts: &'a [&'a str],
    /// Whether the scripts may send requests to the page's own server.
    pub connects: bool,
}

/// The content security policy for these scripts and styles.
pub(crate) fn policy(scripts: &[&str], styles: &str, connects: bool) -> String {
    let hashes: Vec<String> = scripts.iter().map(|script| hash(script)).collect();
    let scripts = if hashes.is_empty() { "'none'".into() } else { hashes.join(" ") };
    let connects = if connects { "'self'" } else { "'none'" };
    format!("default-src 'none'; script-src {scripts}; style-src {styles}; connect-src {connects}; base-uri 'none'; form-action 'none'")
}

pub(crate) fn hash(text: &str) -> String {
    format!("'sha256-{}'", base64(&Sha256::digest(text)))
}

impl ScriptedPage<'_> {
    /// The file.
    pub fn to_html(&self) -> String {
        let ScriptedPage { title, body, style, data, scripts, connects } = *self;
        let policy = policy(scripts, &hash(style), connects);
        let title = escape(title);
        let mut out = String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\n");
        out += &format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\"/>\n");
        out += "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"/><meta name=\"color-scheme\" content=\"light dark\"/>\n";
        out += &format!("<title>{title}</title>\n<style>{style}</style></head>\n<body>\n{body}\n");
        out += &format!("<script type=\"application/json\" id=\"data\">{data}</script>\n");
        for script in scripts {
            out += &format!("<script>{script}</script>\n");
        }
        out + "</body></html>\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert_eq!(base64(b"any carnal pleas"), "YW55IGNhcm5hbCBwbGVhcw==");
        // The example of the content security policy specification.
        assert_eq!(hash("doSomething();"), format!("'sha256-{}'", "RFWPLDbv2BY+rCkDzsE+0fr8ylGr2R2faWMhq4lfEQc="));
        assert_eq!(json_for_script(&"</script>\u{2028}"), "\"\\u003c/script>\\u2028\"");
    }

    #[test]
    fn the_policy_allows_only_the_inline_scripts_and_styles() {
        let page = ScriptedPage { title: "<a>", body: "<p>x</p>", style: "p{}", data: "1", scripts: &["let x;"], connects: false };
        let html = page.to_html();
        assert!(html.contains(&hash("let x;")) && html.contains(&hash("p{}")) && html.contains("connect-src 'none'"), "{html}");
        assert!(html.contains("<title>&lt;a&gt;</title>") && !html.contains("unsafe-inline"));
    }
}
