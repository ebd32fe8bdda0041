//! What pages with scripts need: data and code that lie in the page itself, under a policy that lets nothing else run.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::svg::escape;

/// Bytes as base64.
pub fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// A value as JSON that can stand in a `<script type="application/json">`: no `<` that could end it, and nothing that XML reads otherwise.
pub fn json_for_script(value: &impl Serialize) -> String {
    let text = serde_json::to_string(value).expect("texts, numbers and lists are always valid JSON");
    text.replace('<', "\\u003c").replace('&', "\\u0026").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

/// One HTML file with its style, data and scripts inside. A browser lets these scripts and this style act, by their hashes, and nothing else,
/// and fetches nothing.
#[derive(Clone, Debug, Default)]
pub struct ScriptedPage<'a> {
    /// In the title bar.
    pub title: &'a str,
    /// What stands in the body, as HTML.
    pub body: &'a str,
    /// A style sheet.
    pub style: &'a str,
    /// Read by the scripts under the id `data`; made by [`json_for_script`].
    pub data: &'a str,
    /// Run one after the other, once the body is there.
    pub scripts: &'a [&'a str],
    /// Whether the scripts may ask the server that the page came from.
    pub connects: bool,
}

/// What a browser may do on a page with these scripts and these styles.
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
        // The example of the specification of content security policies.
        assert_eq!(hash("doSomething();"), format!("'sha256-{}'", "RFWPLDbv2BY+rCkDzsE+0fr8ylGr2R2faWMhq4lfEQc="));
        assert_eq!(json_for_script(&"</script>\u{2028}"), "\"\\u003c/script>\\u2028\"");
    }

    #[test]
    fn nothing_but_what_is_there_may_act() {
        let page = ScriptedPage { title: "<a>", body: "<p>x</p>", style: "p{}", data: "1", scripts: &["let x;"], connects: false };
        let html = page.to_html();
        assert!(html.contains(&hash("let x;")) && html.contains(&hash("p{}")) && html.contains("connect-src 'none'"), "{html}");
        assert!(html.contains("<title>&lt;a&gt;</title>") && !html.contains("unsafe-inline"));
    }
}
