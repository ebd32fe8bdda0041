//! Colours, light and dark.

/// Colours of series, dark on light; the first is for what others are compared with.
pub const LIGHT: [&str; 6] = ["#1f2328", "#0b5fc0", "#b93a08", "#0a7352", "#8a3aad", "#8a5a00"];
/// The same series, light on dark.
pub const DARK: [&str; 6] = ["#e6edf3", "#62adff", "#ff8f63", "#45d6a3", "#d3a9ff", "#e8b84a"];

/// What a theme consists of.
pub struct Theme {
    pub background: &'static str,
    pub text: &'static str,
    pub quiet: &'static str,
    pub grid: &'static str,
    pub series: [&'static str; 6],
}

pub const LIGHT_THEME: Theme = Theme { background: "#ffffff", text: "#1f2328", quiet: "#57606a", grid: "#e3e7ec", series: LIGHT };
pub const DARK_THEME: Theme = Theme { background: "#0d1117", text: "#e6edf3", quiet: "#9aa5b1", grid: "#262d36", series: DARK };

/// The class of a series' colour.
pub fn class(color: usize) -> String {
    format!("c{}", color % LIGHT.len())
}

/// The style sheet of a figure.
pub fn sheet() -> String {
    let mut css = String::from(
        "svg{max-width:100%;height:auto}\
         text{font-family:system-ui,-apple-system,\"Segoe UI\",Roboto,\"DejaVu Sans\",sans-serif;font-size:13px}\
         .title{font-size:16px;font-weight:600}.chart{font-size:14px;font-weight:600}.mark{font-size:12px;font-weight:600}\
         .line{fill:none;stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}.dashed{stroke-dasharray:6 5}\
         .grid{stroke-width:1}.axis{stroke-width:1}.drop{stroke-width:1;stroke-dasharray:2 3}.dot{stroke-width:2}",
    );
    css += &rules(&LIGHT_THEME);
    css += &format!("@media (prefers-color-scheme:dark){{{}}}", rules(&DARK_THEME));
    css
}

fn rules(theme: &Theme) -> String {
    let Theme { background, text, quiet, grid, series } = theme;
    let mut css = format!(
        ".background{{fill:{background}}}.dot{{stroke:{background}}}.halo{{stroke:{background};stroke-width:4;stroke-linejoin:round;paint-order:stroke}}\
         text{{fill:{text}}}.quiet{{fill:{quiet}}}.grid{{stroke:{grid}}}.axis{{stroke:{quiet}}}"
    );
    for (i, color) in series.iter().enumerate() {
        css += &format!(".line.c{i},.drop.c{i}{{stroke:{color}}}.dot.c{i},.mark.c{i}{{fill:{color}}}");
    }
    css
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Relative luminance by the web's accessibility guidelines.
    fn luminance(color: &str) -> f64 {
        let channel = |i: usize| {
            let c = u8::from_str_radix(&color[i..i + 2], 16).expect("two hex digits") as f64 / 255.0;
            if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
    }

    #[test]
    fn text_and_series_stand_out_from_the_background() {
        for theme in [LIGHT_THEME, DARK_THEME] {
            for color in theme.series.into_iter().chain([theme.text, theme.quiet]) {
                let (a, b) = (luminance(color), luminance(theme.background));
                let contrast = (a.max(b) + 0.05) / (a.min(b) + 0.05);
                assert!(contrast >= 4.5, "{color} on {}: {contrast:.2}", theme.background);
            }
        }
    }
}
