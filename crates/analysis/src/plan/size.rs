//! Parsing of byte sizes and token counts.

use crate::Error;

const BYTES: [(&str, u64); 9] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("b", 1),
];
const COUNTS: [(&str, u64); 4] = [("k", 1_000), ("m", 1_000_000), ("b", 1_000_000_000), ("t", 1_000_000_000_000)];

/// Bytes: `2GiB`, `500 MB`, `1.5GB`, `4096`.
pub fn parse_bytes(text: &str) -> Result<u64, Error> {
    parse(text, &BYTES).ok_or_else(|| Error::Size { text: text.into(), expected: "bytes such as 2GiB, 500MB or 4096" })
}

/// A count: `300B`, `20M`, `2.5e9`, `4096`.
pub fn parse_count(text: &str) -> Result<u64, Error> {
    parse(text, &COUNTS).ok_or_else(|| Error::Size { text: text.into(), expected: "a positive number such as 4096, 20M or 2.5B" })
}

fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let lower = text.trim().to_lowercase();
    let unit = units.iter().find_map(|&(name, size)| Some((lower.strip_suffix(name)?, size)));
    let (number, unit) = unit.unwrap_or((&lower, 1));
    let value = number.trim().parse::<f64>().ok()? * unit as f64;
    // Larger numbers are not exact in float64.
    (value >= 1.0 && value <= (1u64 << 53) as f64).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_and_mistakes_reported() {
        for (text, bytes) in
            [("2GiB", 2 << 30), ("500 MB", 500_000_000), ("1.5kb", 1500), ("4096", 4096), ("7b", 7), (" 1 TiB ", 1 << 40), ("1e3", 1000)]
        {
            assert_eq!(parse_bytes(text).ok(), Some(bytes), "{text}");
        }
        for (text, count) in [("300B", 300_000_000_000), ("20m", 20_000_000), ("2.5e9", 2_500_000_000), ("1", 1)] {
            assert_eq!(parse_count(text).ok(), Some(count), "{text}");
        }
        for text in ["", "GiB", "-1GB", "0", "1e300", "nan", "inf", "2 apples", "1e17"] {
            assert!(parse_bytes(text).is_err_and(|error| error.to_string().contains("2GiB")), "{text}");
            assert!(parse_count(text).is_err(), "{text}");
        }
    }
}
