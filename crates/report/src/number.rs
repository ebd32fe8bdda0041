//! Number formatting.

use serde::{Deserialize, Deserializer};

use crate::scale::Unit;

/// 139,425
pub fn thousands(n: impl TryInto<u64>) -> String {
    let digits = n.try_into().unwrap_or(u64::MAX).to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// 1 document, 139,425 documents. For nouns with a plural in -s.
pub fn counted(n: impl TryInto<u64>, what: &str) -> String {
    let n = n.try_into().unwrap_or(u64::MAX);
    format!("{} {what}{}", thousands(n), if n == 1 { "" } else { "s" })
}

/// Three significant digits: 1234, 123, 12.3, 1.23, 0.123.
pub fn sig3(x: f64) -> String {
    format!("{x:.*}", digits(x))
}

/// Number of decimals that [`sig3`] prints.
pub(crate) fn digits(x: f64) -> usize {
    match x.abs() {
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        x if x >= 1.0 => 2,
        _ => 3,
    }
}

/// 7 s, 3 min 20 s, 2 h 05 min, 3.0 days, 1.5 years
pub fn duration(seconds: f64) -> String {
    const DAY: f64 = 86_400.0;
    const YEAR: f64 = 365.25 * DAY;
    if !seconds.is_finite() || seconds < 0.0 {
        return "–".into();
    }
    let whole = seconds.round();
    let large = |x: f64, name: &str| match x {
        x if x >= 1e6 => format!("{x:.0e} {name}"),
        x if x >= 100.0 => format!("{} {name}", thousands(x as u64)),
        x => format!("{x:.1} {name}"),
    };
    match seconds {
        0.0 => "0 s".into(),
        s if s < 10.0 => Unit::Seconds.format(s),
        _ if whole < 60.0 => format!("{whole} s"),
        _ if whole < 3600.0 => format!("{} min {:02} s", whole as u64 / 60, whole as u64 % 60),
        s if s < 2.0 * DAY => format!("{} h {:02} min", whole as u64 / 3600, whole as u64 / 60 % 60),
        s if s < YEAR => large(s / DAY, "days"),
        s => large(s / YEAR, "years"),
    }
}

/// For `deserialize_with`: reads `null` as NaN. JSON writes NaN and infinity as `null`.
pub fn nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted() {
        assert_eq!([0_u64, 999, 1000, 139_425, 1_234_567].map(thousands), ["0", "999", "1,000", "139,425", "1,234,567"]);
        assert_eq!([1234.5, 99.94, 1.234, 0.01].map(sig3), ["1234", "99.9", "1.23", "0.010"]);
        let day = 86_400.0;
        for (seconds, text) in [
            (0.0, "0 s"),
            (0.5, "500 ms"),
            (59.7, "1 min 00 s"),
            (90.0, "1 min 30 s"),
            (7500.0, "2 h 05 min"),
            (3.0 * day, "3.0 days"),
            (365.25 * day * 1.5, "1.5 years"),
            (365.25 * day * 1234.0, "1,234 years"),
            (f64::NAN, "–"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn counts_have_singular_and_plural() {
        let counts = [0, 1, 2, 1_000].map(|n: u64| counted(n, "document"));
        assert_eq!(counts, ["0 documents", "1 document", "2 documents", "1,000 documents"]);
    }
}
