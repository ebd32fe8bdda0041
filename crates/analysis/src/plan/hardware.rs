//! Hardware: this machine by measurement, others by their data sheets.

use serde::{Deserialize, Serialize};
use termwise_base::{nearest, threads};
use termwise_report::counted;

use super::count::Work;
use crate::Error;
use crate::bench::Machine;

/// A machine, and the fractions of its peaks that are assumed to be reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hardware {
    /// Its name in options.
    pub name: String,
    /// Its full name.
    pub title: String,
    /// Peak floating-point operations per second, dense, in `precision`.
    pub peak_flops: f64,
    /// Precision of matrix products; weights, states and caches are always float32.
    pub precision: String,
    /// Peak memory bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Bytes of memory; absent if not stated.
    pub memory: Option<u64>,
    /// Fraction of the peak that training and prefill are assumed to reach.
    pub compute_share: f64,
    /// Fraction of the bandwidth that decoding is assumed to reach.
    pub bandwidth_share: f64,
    /// Source of the figures.
    pub source: String,
}

/// The name of this machine.
pub const LOCAL: &str = "here";
/// The name for all machines.
const ALL: &str = "all";
/// Fraction of this machine's peak in registers: a training step of a small model reached 0.60 (width 256, 4 layers); larger products reach
/// more, longer contexts less.
const LOCAL_COMPUTE_SHARE: f64 = 0.55;
/// Fraction of this machine's measured read bandwidth: writing is slower.
const LOCAL_BANDWIDTH_SHARE: f64 = 0.8;
/// Fraction of a data sheet's operations, as reported for training runs of models that are large enough to fill the machine.
const SHEET_COMPUTE: f64 = 0.4;
/// Fraction of a data sheet's bandwidth.
const SHEET_BANDWIDTH: f64 = 0.7;

const GB: u64 = 1_000_000_000;

struct Sheet {
    name: &'static str,
    title: &'static str,
    tflops: f64,
    precision: &'static str,
    gb_per_s: f64,
    memory_gb: Option<u64>,
    source: &'static str,
}

const SHEETS: [Sheet; 5] = [
    Sheet {
        name: "a100",
        title: "NVIDIA A100 80GB SXM",
        tflops: 312.0,
        precision: "bfloat16",
        gb_per_s: 2039.0,
        memory_gb: Some(80),
        source: "NVIDIA's data sheet: 312 TFLOP/s bfloat16 without sparsity (19.5 float32), 2039 GB/s",
    },
    Sheet {
        name: "h100",
        title: "NVIDIA H100 SXM",
        tflops: 989.4,
        precision: "bfloat16",
        gb_per_s: 3350.0,
        memory_gb: Some(80),
        source: "NVIDIA's data sheet: 1979 TFLOP/s bfloat16 with sparsity, half of it without (67 float32), 3350 GB/s",
    },
    Sheet {
        name: "rtx4090",
        title: "NVIDIA GeForce RTX 4090",
        tflops: 165.2,
        precision: "bfloat16",
        gb_per_s: 1008.0,
        memory_gb: Some(24),
        source: "NVIDIA's Ada white paper: 165.2 TFLOP/s bfloat16 without sparsity, float32 sums (82.6 float32), 1008 GB/s",
    },
    Sheet {
        name: "m2-ultra",
        title: "Apple M2 Ultra, 76 GPU cores",
        tflops: 27.2,
        precision: "float32",
        gb_per_s: 800.0,
        memory_gb: Some(192),
        source: "Apple states 800 GB/s and up to 192 GB; operations counted as 76 cores × 128 × 2 × 1.398 GHz",
    },
    Sheet {
        name: "xeon-8480",
        title: "Intel Xeon Platinum 8480+, 56 cores, AVX-512",
        tflops: 7.17,
        precision: "float32",
        gb_per_s: 307.2,
        memory_gb: None,
        source: "operations counted as 56 cores × 64 × 2.0 GHz (base; AMX not used), 8 channels of DDR5-4800",
    },
];

impl Hardware {
    /// The machines of these names in order; `all` means every machine, an empty list this machine.
    /// This machine is measured on this many threads, for about half a second.
    pub fn find(names: &[String], threads: usize) -> Result<Vec<Hardware>, Error> {
        let known = || [LOCAL].into_iter().chain(SHEETS.iter().map(|sheet| sheet.name));
        let mut wanted: Vec<&str> = Vec::new();
        for name in names.iter().map(String::as_str) {
            let lower = name.to_lowercase();
            match known().find(|known| *known == lower) {
                Some(name) => wanted.push(name),
                None if lower == ALL => wanted.extend(known()),
                None => {
                    let suggestion = nearest(&lower, known().chain([ALL])).map(str::to_owned);
                    let known = known().chain([ALL]).collect::<Vec<_>>().join(", ");
                    return Err(Error::Unknown { what: "hardware", name: name.into(), suggestion, known });
                }
            }
        }
        if wanted.is_empty() {
            wanted.push(LOCAL);
        }
        let mut found: Vec<Hardware> = Vec::new();
        for name in wanted {
            if found.iter().all(|hardware| hardware.name != name) {
                found.push(match SHEETS.iter().find(|sheet| sheet.name == name) {
                    Some(sheet) => sheet.hardware(),
                    None => Hardware::measured(&threads::pool(threads)?.install(Machine::measure)),
                });
            }
        }
        Ok(found)
    }

    /// This machine.
    pub fn measured(machine: &Machine) -> Hardware {
        let Machine { threads, instructions, peak_gflops, read_gb_per_s } = machine;
        Hardware {
            name: LOCAL.into(),
            title: format!("this machine, {}, {instructions}", counted(*threads, "thread")),
            peak_flops: peak_gflops * 1e9,
            precision: "float32".into(),
            bandwidth: read_gb_per_s * 1e9,
            memory: None,
            compute_share: LOCAL_COMPUTE_SHARE,
            bandwidth_share: LOCAL_BANDWIDTH_SHARE,
            source: format!("measured now: {peak_gflops:.0} GFLOP/s in registers, {read_gb_per_s:.1} GB/s reading"),
        }
    }

    /// Bytes of an activation that training stores.
    pub fn activation_bytes(&self) -> u64 {
        if self.precision == "bfloat16" { 2 } else { 4 }
    }

    /// Seconds for this work: the maximum of compute time and memory time.
    pub fn seconds(&self, work: Work) -> f64 {
        self.compute_seconds(work.flops).max(self.memory_seconds(work.bytes))
    }

    /// Compute time in seconds.
    pub fn compute_seconds(&self, flops: f64) -> f64 {
        flops / (self.peak_flops * self.compute_share)
    }

    /// Memory time in seconds.
    pub fn memory_seconds(&self, bytes: f64) -> f64 {
        bytes / (self.bandwidth * self.bandwidth_share)
    }
}

impl Sheet {
    fn hardware(&self) -> Hardware {
        Hardware {
            name: self.name.into(),
            title: self.title.into(),
            peak_flops: self.tflops * 1e12,
            precision: self.precision.into(),
            bandwidth: self.gb_per_s * 1e9,
            memory: self.memory_gb.map(|gb| gb * GB),
            compute_share: SHEET_COMPUTE,
            bandwidth_share: SHEET_BANDWIDTH,
            source: self.source.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(names: &[&str]) -> Result<Vec<Hardware>, Error> {
        Hardware::find(&names.iter().map(ToString::to_string).collect::<Vec<_>>(), 1)
    }

    #[test]
    fn names_are_found_once_and_mistakes_get_a_suggestion() {
        let names: Vec<String> = find(&["H100", "a100", "h100"]).expect("known").into_iter().map(|hardware| hardware.name).collect();
        assert_eq!(names, ["h100", "a100"]);
        assert_eq!(find(&["all"]).expect("known").len(), SHEETS.len() + 1);
        let error = find(&["h10"]).expect_err("unknown");
        assert!(error.is_usage() && error.to_string().contains("did you mean `h100`?"), "{error}");
        let error = find(&["abacus"]).expect_err("unknown").to_string();
        assert!(error.contains("xeon-8480") && error.contains("here"), "{error}");
    }

    #[test]
    fn the_slower_of_operations_and_bytes_decides() {
        let a100 = &find(&["a100"]).expect("known")[0];
        assert_eq!(a100.seconds(Work { flops: 312e12 * 0.4, bytes: 1.0 }), 1.0);
        assert!((a100.seconds(Work { flops: 1.0, bytes: 2039e9 * 0.7 }) - 1.0).abs() < 1e-12);
    }
}
