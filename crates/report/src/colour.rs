//! Colours of the light and dark themes, and colour maps.

/// Red, green and blue.
pub type Rgb = [u8; 3];

/// Number of series colours; further series reuse them.
pub const SERIES: usize = 9;

/// Colours of the sequential ramp.
pub const RAMP: usize = 7;

/// Colour numbers from here on are steps of the ramp.
pub const RAMP_START: usize = 900;

/// The colour number of step `step` of `of` ordered series, such as orders of a Taylor expansion: a sequential ramp from light to dark.
pub fn ramp(step: usize, of: usize) -> usize {
    let last = of.saturating_sub(1).max(1);
    RAMP_START + (step.min(last) * (RAMP - 1) + last / 2) / last
}

/// The index of a colour number in the palette.
pub fn index(color: usize) -> usize {
    match color.checked_sub(RAMP_START) {
        Some(step) => SERIES + step % RAMP,
        None => color % SERIES,
    }
}

/// The theme of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Theme {
    /// Dark on white.
    #[default]
    Light,
    /// Light on near-black.
    Dark,
}

/// The colours of a theme.
pub struct Colours {
    pub background: Rgb,
    pub text: Rgb,
    pub quiet: Rgb,
    pub grid: Rgb,
    /// Series colours, the first for the baseline, then the ramp.
    pub series: [Rgb; SERIES + RAMP],
}

const fn hex(rgb: u32) -> Rgb {
    [(rgb >> 16) as u8, (rgb >> 8) as u8, rgb as u8]
}

const LIGHT: Colours = Colours {
    background: hex(0xffffff),
    text: hex(0x1f2328),
    quiet: hex(0x57606a),
    grid: hex(0xe3e7ec),
    series: [
        hex(0x1f2328),
        hex(0x0b5fc0),
        hex(0xb93a08),
        hex(0x0a7352),
        hex(0x8a3aad),
        hex(0x8a5a00),
        hex(0x00707c),
        hex(0xb3186d),
        hex(0x5d6a00),
        hex(0xb25a00),
        hex(0xbf3b33),
        hex(0xae2a68),
        hex(0x9a2a80),
        hex(0x832c93),
        hex(0x5130a3),
        hex(0x1d2378),
    ],
};
const DARK: Colours = Colours {
    background: hex(0x0d1117),
    text: hex(0xe6edf3),
    quiet: hex(0x9aa5b1),
    grid: hex(0x262d36),
    series: [
        hex(0xe6edf3),
        hex(0x62adff),
        hex(0xff8f63),
        hex(0x45d6a3),
        hex(0xd3a9ff),
        hex(0xe8b84a),
        hex(0x4fd3de),
        hex(0xff85bd),
        hex(0xc2cf4e),
        hex(0xc65f8c),
        hex(0xe0706f),
        hex(0xe87d62),
        hex(0xf08a55),
        hex(0xf6ab4c),
        hex(0xf8cc62),
        hex(0xf5ee9e),
    ],
};

impl Theme {
    pub(crate) const ALL: [Theme; 2] = [Theme::Light, Theme::Dark];

    pub(crate) fn colours(self) -> &'static Colours {
        match self {
            Theme::Light => &LIGHT,
            Theme::Dark => &DARK,
        }
    }
}

impl Colours {
    pub fn of(&self, series: usize) -> Rgb {
        self.series[index(series)]
    }
}

/// `#0b5fc0`
pub fn code([r, g, b]: Rgb) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// Sequential colour map on 0 to 1: dark violet, blue, green, light yellow, with uniform lightness steps.
pub fn sequential(share: f64) -> Rgb {
    let t = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
    // The largest chroma that sRGB can show at every lightness, without kinks at the gamut boundary.
    let away = 2.0 * t - 1.0;
    let chroma = 0.105 + away * away * if t < 0.5 { 0.015 } else { 0.06 };
    oklch(0.24 + 0.70 * t, chroma, 310.0 - 205.0 * t.powf(1.15))
}

/// Diverging colour map on −1 to 1: blue, near-white, orange, symmetric in lightness.
pub fn diverging(share: f64) -> Rgb {
    let t = if share.is_finite() { share.clamp(-1.0, 1.0) } else { 0.0 };
    oklch(0.96 - 0.5 * t.abs(), 0.125 * t.abs().powf(0.9), if t < 0.0 { 255.0 } else { 50.0 })
}

/// OKLCH (lightness, chroma, hue) to sRGB. Chroma is reduced until the colour is in gamut.
fn oklch(lightness: f64, chroma: f64, hue: f64) -> Rgb {
    let (sin, cos) = hue.to_radians().sin_cos();
    let linear = |chroma: f64| {
        let (a, b) = (chroma * cos, chroma * sin);
        let l = (lightness + 0.396_337_777_4 * a + 0.215_803_757_3 * b).powi(3);
        let m = (lightness - 0.105_561_345_8 * a - 0.063_854_172_8 * b).powi(3);
        let s = (lightness - 0.089_484_177_5 * a - 1.291_485_548_0 * b).powi(3);
        [
            4.076_741_662_1 * l - 3.307_711_591_3 * m + 0.230_969_929_2 * s,
            -1.268_438_004_6 * l + 2.609_757_401_1 * m - 0.341_319_396_5 * s,
            -0.004_196_086_3 * l - 0.703_418_614_7 * m + 1.707_614_701_0 * s,
        ]
    };
    let shown = |rgb: &[f64; 3]| rgb.iter().all(|c| (-1e-4..=1.0001).contains(c));
    let steps = (0..=64).rev().map(|i| linear(chroma * i as f64 / 64.0));
    let rgb = steps.into_iter().find(shown).unwrap_or_else(|| linear(0.0));
    rgb.map(|c| {
        let c = c.clamp(0.0, 1.0);
        let c = if c <= 0.003_130_8 { 12.92 * c } else { 1.055 * c.powf(1.0 / 2.4) - 0.055 };
        (c * 255.0).round() as u8
    })
}

/// WCAG relative luminance, 0 to 1.
pub fn luminance(rgb: Rgb) -> f64 {
    let [r, g, b] = rgb.map(|c| {
        let c = f64::from(c) / 255.0;
        if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
    });
    0.2126 * r + 0.7152 * g + 0.0722 * b
}

/// Whether white text has a higher contrast on this colour than black text.
pub fn is_dark(rgb: Rgb) -> bool {
    let l = luminance(rgb) + 0.05;
    1.05 / l > l / 0.05
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contrast(a: Rgb, b: Rgb) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn text_and_series_have_enough_contrast() {
        for theme in [Theme::Light, Theme::Dark] {
            let colours = theme.colours();
            for color in colours.series.into_iter().chain([colours.text, colours.quiet]) {
                let contrast = contrast(color, colours.background);
                assert!(contrast >= 4.5, "{color:?} on {:?}: {contrast:.2}", colours.background);
            }
        }
    }

    #[test]
    fn the_ramp_is_ordered_by_contrast_and_never_meets_the_series() {
        for theme in [Theme::Light, Theme::Dark] {
            let colours = theme.colours();
            let steps: Vec<f64> = (0..RAMP).map(|step| contrast(colours.of(ramp(step, RAMP)), colours.background)).collect();
            assert!(steps.windows(2).all(|pair| pair[0] < pair[1]), "{steps:?}");
            for (i, color) in colours.series.iter().enumerate() {
                assert!(!colours.series[..i].contains(color), "{color:?}");
            }
        }
        let chosen = |of| (0..of).map(|step| index(ramp(step, of)) - SERIES).collect::<Vec<_>>();
        assert_eq!((chosen(1), chosen(2), chosen(7)), (vec![0], vec![0, 6], vec![0, 1, 2, 3, 4, 5, 6]));
        assert_eq!(chosen(20).last(), Some(&6));
        assert_eq!(index(10), 1, "other numbers repeat");
    }

    /// CIE lightness: independent of the OKLCH formula that makes the colours.
    fn lightness(rgb: Rgb) -> f64 {
        let y = luminance(rgb);
        if y <= 0.008856 { 903.3 * y } else { 116.0 * y.cbrt() - 16.0 }
    }

    /// Simulated deuteranopia (Viénot, Brettel and Mollon 1999), in linear light.
    fn deuteranope([r, g, b]: Rgb) -> Rgb {
        let linear = |c: u8| (f64::from(c) / 255.0).powf(2.2);
        let coded = |c: f64| (c.clamp(0.0, 1.0).powf(1.0 / 2.2) * 255.0).round() as u8;
        let (r, g, b) = (linear(r), linear(g), linear(b));
        let yellow = 0.292_75 * r + 0.707_25 * g;
        [coded(yellow), coded(yellow), coded(-0.022_34 * r + 0.022_34 * g + b)]
    }

    #[test]
    fn the_sequential_map_is_monotonic_and_uniform_in_lightness() {
        let colours: Vec<Rgb> = (0..=100).map(|i| sequential(i as f64 / 100.0)).collect();
        for seen in [colours.clone(), colours.iter().map(|&c| deuteranope(c)).collect()] {
            assert!(seen.windows(2).all(|w| luminance(w[0]) < luminance(w[1]) + 1e-9), "{seen:?}");
        }
        let steps: Vec<f64> = colours.windows(11).step_by(10).map(|w| lightness(w[10]) - lightness(w[0])).collect();
        assert!(steps.iter().all(|s| (5.0..11.0).contains(s)), "{steps:?}");
        assert!(colours.windows(2).all(|w| w[0] != w[1]));
        let both = colours.windows(2).map(|w| (w[0], w[1])).chain((-99..=100).map(|i| {
            let t = f64::from(i) / 100.0;
            (diverging(t - 0.01), diverging(t))
        }));
        let far = |(a, b): (Rgb, Rgb)| a.into_iter().zip(b).map(|(a, b)| a.abs_diff(b)).max();
        assert!(both.map(far).max() <= Some(Some(9)), "no visible kink");
        assert_eq!((sequential(-3.0), sequential(f64::NAN), sequential(7.0)), (colours[0], colours[0], colours[100]));
    }

    #[test]
    fn the_diverging_map_is_symmetric() {
        for i in 1..=10 {
            let t = f64::from(i) / 10.0;
            let (below, above) = (diverging(-t), diverging(t));
            assert!((lightness(below) - lightness(above)).abs() < 6.0, "{t}");
            assert!(below[2] > below[0] && above[0] > above[2], "{t}: {below:?} {above:?}");
            assert!(luminance(above) < luminance(diverging(t - 0.1)));
        }
    }

    #[test]
    fn text_is_readable_on_every_colour() {
        for i in -100..=100 {
            let t = f64::from(i) / 100.0;
            for color in [sequential(t.abs()), diverging(t)] {
                let ink = if is_dark(color) { [255; 3] } else { [0; 3] };
                assert!(contrast(color, ink) >= 4.5, "{t}");
            }
        }
    }
}
