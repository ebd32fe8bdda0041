//! Axes: mapping of values to positions, and tick labels.

/// Scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Linear.
    Linear,
    /// Logarithmic; only for positive values.
    Log,
}

/// Unit of the values, for tick labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// 1, 10, 1k, 1M, 1B
    Number,
    /// B, KB, MB, in powers of 1000.
    Bytes,
    /// µs, ms, s
    Seconds,
    /// Fractions: 0.25 is 25 %.
    Percent,
}

impl Unit {
    /// A value with at most three significant digits, for tick labels.
    pub fn format(self, value: f64) -> String {
        self.digits(value, 3)
    }

    /// A value with at most six significant digits, for tooltips.
    pub(crate) fn exact(self, value: f64) -> String {
        self.digits(value, 6)
    }

    /// A value with at most two significant digits, small values as powers of ten.
    pub(crate) fn brief(self, value: f64) -> String {
        if self == Unit::Number && value != 0.0 && value.abs() < 0.0095 {
            let text = format!("{:.0e}", value.abs());
            return if value < 0.0 { format!("−{text}") } else { text };
        }
        self.digits(value, 2)
    }

    /// Tick labels of one axis, with enough digits to be distinct.
    pub(crate) fn ticks(self, ticks: &[f64]) -> Vec<String> {
        let enough = |digits: &usize| ticks.iter().all(|&tick| self.digits(tick, *digits) == self.digits(tick, digits + 4));
        let digits = (3..9).find(enough).unwrap_or(9);
        let texts: Vec<String> = ticks.iter().map(|&tick| powers(self.digits(tick, digits))).collect();
        let even = ticks.windows(3).all(|t| ((t[2] - t[1]) - (t[1] - t[0])).abs() < 1e-6 * (t[1] - t[0]).abs());
        if even { equally_long(&texts).unwrap_or(texts) } else { texts }
    }

    fn digits(self, value: f64, most: usize) -> String {
        const NUMBERS: [(f64, &str); 5] = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, "")];
        const BYTES: [(f64, &str); 6] = [(1e15, " PB"), (1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " KB"), (1.0, " B")];
        const SECONDS: [(f64, &str); 4] = [(1.0, " s"), (1e-3, " ms"), (1e-6, " µs"), (1e-9, " ns")];
        let units: &[(f64, &str)] = match self {
            Unit::Number => &NUMBERS,
            Unit::Bytes => &BYTES,
            Unit::Seconds => &SECONDS,
            Unit::Percent => &[(0.01, " %")],
        };
        if !value.is_finite() {
            return "none".into();
        }
        let size = value.abs();
        // Values just below a unit because of rounding are written in that unit.
        let (unit, name) = units.iter().copied().find(|(unit, _)| size >= unit * 0.9995).unwrap_or(units[units.len() - 1]);
        let sign = if value < 0.0 { "−" } else { "" };
        let scaled = size / unit;
        match scaled {
            0.0 => format!("0{name}"),
            x if !(0.001..9999.5).contains(&x) => {
                let text = format!("{scaled:.*e}", most.saturating_sub(3));
                let (number, power) = text.split_once('e').unwrap_or((&text, "0"));
                format!("{sign}{}e{power}{name}", trimmed(number))
            }
            x => {
                let digits = (most as i32 - 1 - x.log10().floor() as i32).clamp(0, most as i32 + 3) as usize;
                format!("{sign}{}{name}", trimmed(&format!("{scaled:.digits$}")))
            }
        }
    }
}

/// 10⁻⁸ for 1e-8.
fn powers(text: String) -> String {
    let high = |c: char| "⁰¹²³⁴⁵⁶⁷⁸⁹".chars().nth(c.to_digit(10)? as usize);
    let raised = |c: char| if c == '-' { Some('⁻') } else { high(c) };
    match text.strip_prefix("1e").and_then(|power| power.chars().map(raised).collect::<Option<String>>()) {
        Some(power) => format!("10{power}"),
        None => text,
    }
}

/// Numbers of one unit with the same number of decimals, except zero; `None` if the units differ.
fn equally_long(texts: &[String]) -> Option<Vec<String>> {
    let is_digit = |c: char| c.is_ascii_digit() || c == '.' || c == '−';
    let split = |text: &String| text.split_at(text.find(|c| !is_digit(c)).unwrap_or(text.len())).0.len();
    let parts: Vec<(&str, &str)> = texts.iter().map(|text| text.split_at(split(text))).collect();
    let counted: Vec<&(&str, &str)> = parts.iter().filter(|(number, _)| *number != "0").collect();
    let unit = counted.first()?.1;
    let after = |number: &str| number.split_once('.').map_or(0, |(_, digits)| digits.len());
    let most = counted.iter().map(|(number, _)| after(number)).max()?;
    if counted.iter().any(|(_, other)| *other != unit) {
        return None;
    }
    let padded = |number: &str| match most - after(number) {
        0 => number.to_string(),
        missing => format!("{number}{}{}", if number.contains('.') { "" } else { "." }, "0".repeat(missing)),
    };
    Some(parts.iter().map(|(number, unit)| if *number == "0" { format!("0{unit}") } else { padded(number) + unit }).collect())
}

/// Removes trailing zeros.
fn trimmed(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

/// A scale with its limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Domain {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Domain {
    /// With these limits, which are in the domain and differ.
    pub fn between(scale: Scale, low: f64, high: f64) -> Domain {
        Domain { scale, low, high }
    }

    /// Around these values, ignoring values outside the domain; `None` if none is left.
    pub fn around(scale: Scale, values: impl Iterator<Item = f64>, padded: bool) -> Option<Domain> {
        let has_place = |value: &f64| value.is_finite() && (scale == Scale::Linear || *value > 0.0);
        let (low, high) = values.filter(has_place).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        if low > high {
            return None;
        }
        let bounded = |low: f64, high: f64| Domain { scale, low, high };
        Some(match scale {
            Scale::Log => {
                let room = if low == high {
                    10.0
                } else if padded {
                    (high / low).powf(0.06).clamp(1.3, 10.0)
                } else {
                    1.0
                };
                bounded((low / room).max(f64::MIN_POSITIVE), (high * room).min(f64::MAX))
            }
            Scale::Linear => {
                let room = if low == high {
                    low.abs().max(1.0) / 2.0
                } else if padded {
                    (high / 2.0 - low / 2.0) * 0.1
                } else {
                    0.0
                };
                // Nonnegative amounts keep zero as their lower limit.
                let floor = if low >= 0.0 && low < high / 4.0 { 0.0 } else { (low - room).max(f64::MIN / 2.0) };
                bounded(floor, (high + room).min(f64::MAX / 2.0))
            }
        })
    }

    /// The limits.
    pub fn ends(&self) -> (f64, f64) {
        (self.low, self.high)
    }

    /// Position of a value between the limits, 0 to 1; `None` if it is outside the domain.
    pub fn place(&self, value: f64) -> Option<f64> {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log if value > 0.0 => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
            Scale::Log => return None,
        };
        share.is_finite().then_some(share)
    }

    /// About `most` round values between the limits, ascending; at most `most` + 1.
    pub fn ticks(&self, most: usize) -> Vec<f64> {
        match self.scale {
            Scale::Linear => self.linear_ticks(most),
            Scale::Log => {
                let (low, high) = (self.low.log10(), self.high.log10());
                let decades = |every: i32| {
                    let first = (low / every as f64 - 1e-9).ceil() as i32;
                    let last = (high / every as f64 + 1e-9).floor() as i32;
                    (first..=last).map(move |n| 10f64.powi(n * every))
                };
                let every = (1..).find(|&every| decades(every).count() <= most.max(2)).unwrap_or(1);
                let ticks: Vec<f64> = decades(every).collect();
                if ticks.len() >= 3 {
                    return ticks;
                }
                let within = |x: &f64| (self.low * 0.999_999..=self.high * 1.000_001).contains(x);
                let finer = (low.floor() as i32..=high.ceil() as i32).flat_map(|n| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(n)));
                let finer: Vec<f64> = finer.filter(within).collect();
                match finer.len() {
                    0..2 => self.linear_ticks(most),
                    n if n > most + 1 => ticks,
                    _ => finer,
                }
            }
        }
    }

    fn linear_ticks(&self, most: usize) -> Vec<f64> {
        let raw = (self.high - self.low) / most.max(2) as f64;
        if !(raw.is_finite() && raw > 0.0) {
            return Vec::new();
        }
        let power = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|&step| step >= raw * 0.999_999).unwrap_or(raw);
        let (first, last) = ((self.low / step - 1e-9).ceil(), (self.high / step + 1e-9).floor());
        let count = (last - first) as usize + 1;
        // In a range that is too narrow for floating point, steps do not advance.
        (0..count.min(64)).map(|i| (first + i as f64) * step + 0.0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(scale: Scale, low: f64, high: f64) -> Domain {
        Domain { scale, low, high }
    }

    #[test]
    fn tick_labels_are_short_and_have_units() {
        let number = |x| Unit::Number.format(x);
        assert_eq!([0.0, 1.0, 1000.0, 2.5e6, 1e9, 0.25, 999.9999].map(number), ["0", "1", "1k", "2.5M", "1B", "0.25", "1k"]);
        let bytes = |x| Unit::Bytes.format(x);
        assert_eq!([1.0, 1e3, 557_700.0, 1e9, 2e16].map(bytes), ["1 B", "1 KB", "558 KB", "1 GB", "20 PB"]);
        let seconds = |x| Unit::Seconds.format(x);
        assert_eq!([1e-9, 2e-5, 1e-3, 0.1, 1.0, 120.0].map(seconds), ["1 ns", "20 µs", "1 ms", "100 ms", "1 s", "120 s"]);
        assert_eq!((number(-2000.0), number(1e-7), number(3e20)), ("−2k".into(), "1e-7".into(), "3e8T".into()));
    }

    #[test]
    fn tick_labels_of_one_axis_are_distinct() {
        let ticks = |unit: Unit, values: &[f64]| unit.ticks(values).join(" ");
        assert_eq!(ticks(Unit::Number, &[2.8, 3.0, 3.2]), "2.8 3.0 3.2");
        assert_eq!(ticks(Unit::Number, &[1.58, 1.585, 1.59]), "1.580 1.585 1.590");
        assert_eq!(ticks(Unit::Number, &[-0.5, 0.0, 0.5]), "−0.5 0 0.5");
        assert_eq!(ticks(Unit::Number, &[0.0, 500.0, 1000.0, 1500.0]), "0 500 1k 1.5k");
        assert_eq!(ticks(Unit::Number, &[1e-8, 1e-4, 1.0]), "10⁻⁸ 10⁻⁴ 1");
        assert_eq!(ticks(Unit::Percent, &[0.0, 0.25, 0.5]), "0 % 25 % 50 %");
        assert_eq!([0.0, 0.004, -0.004, 0.012, 0.5, 123.0].map(|x| Unit::Number.brief(x)), ["0", "4e-3", "−4e-3", "0.012", "0.5", "123"]);
        assert_eq!((Unit::Number.format(f64::NAN), Unit::Percent.exact(0.123_456)), ("none".into(), "12.3456 %".into()));
    }

    #[test]
    fn ticks_are_round_ascending_and_inside() {
        assert_eq!(domain(Scale::Linear, 0.0, 1.0).ticks(5), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(domain(Scale::Linear, -3.0, 14.0).ticks(5), [0.0, 5.0, 10.0]);
        assert_eq!(domain(Scale::Log, 1.0, 1e6).ticks(7), [1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6]);
        assert_eq!(domain(Scale::Log, 1.0, 1e6).ticks(4), [1.0, 1e2, 1e4, 1e6]);
        assert_eq!(domain(Scale::Log, 3.0, 40.0).ticks(6), [5.0, 10.0, 20.0]);
        assert_eq!(domain(Scale::Log, 1.05, 1.35).ticks(3), [1.1, 1.2000000000000002, 1.3]);
        for (low, high) in [(1e-300, 1e300), (0.9, 1.1), (1e-9, 1e-8), (5e-324, 1.0)] {
            let d = domain(Scale::Log, low, high);
            let ticks = d.ticks(6);
            assert!((2..=8).contains(&ticks.len()) && ticks.is_sorted(), "{low} {high} {ticks:?}");
            assert!(ticks.iter().all(|&t| d.place(t).is_some_and(|p| (-1e-6..=1.0 + 1e-6).contains(&p))), "{low} {high} {ticks:?}");
        }
    }

    #[test]
    fn domains_cover_the_values_and_ignore_those_outside_the_scale() {
        let values = [f64::NAN, 5.0, f64::INFINITY, 0.0, -1.0, 50.0];
        let d = Domain::around(Scale::Log, values.into_iter(), true).expect("two values");
        assert!(d.low < 5.0 && d.low > 0.0 && d.high > 50.0 && d.high.is_finite());
        assert_eq!((d.place(0.0), d.place(f64::NAN)), (None, None));
        let d = Domain::around(Scale::Linear, values.into_iter(), false).expect("values");
        assert_eq!((d.low, d.high, d.place(50.0)), (-1.0, 50.0, Some(1.0)));
        assert_eq!(Domain::around(Scale::Log, [0.0, f64::NAN].into_iter(), true), None);
        assert_eq!(Domain::around(Scale::Linear, [].into_iter(), true), None);
        for scale in [Scale::Linear, Scale::Log] {
            let d = Domain::around(scale, [3.0].into_iter(), false).expect("one value");
            assert!(d.low < 3.0 && d.high > 3.0 && d.ticks(5).len() >= 2);
        }
        let d = Domain::around(Scale::Linear, [f64::MIN, f64::MAX].into_iter(), true).expect("two values");
        assert!(d.place(0.0).is_some_and(|p| p > 0.4 && p < 0.6));
    }
}
