//! The separation theorem as one call.

use super::{Bridge, DRAWS, Network, RECONSTRUCTION, Reference, Separation, Setting, Sweep};
use crate::Error;

/// Options of [`run`]. Without networks, sizes and `bridge`, the reference figures are computed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SeparationRequest {
    /// `softmax`, `linear`, `power=P`, `taylor=P` or orders such as `taylor=2..8`; default: softmax and linear.
    pub networks: Vec<String>,
    /// Rows; default: 1000, with `bridge` 1e2 to 1e6.
    pub n: Vec<u64>,
    /// Columns; default: 12.
    pub d: Vec<usize>,
    /// Vectors y of the readout; default: max(⌈ln(n/0.01)⌉, 15).
    pub m: Vec<usize>,
    /// The spike of D_1; default: 0.7, with `bridge` 0.7, 1 and 3.
    pub a1: Vec<f64>,
    /// The spike of D_0; default: 0.01.
    pub a0: Option<f64>,
    /// Size of the identity; default: 1 − c, or 0.1.
    pub b: Option<f64>,
    /// Size of the constant column; default: 1 − b.
    pub c: Option<f64>,
    /// Cross-attention: the row sums of the queries are all √ln n.
    pub cross: bool,
    /// Find the smallest order, Taylor and power, with a success of at least 0.9.
    pub bridge: bool,
    /// Draws of y and j3 per point.
    pub draws: u64,
    /// Seed of the draws.
    pub seed: u64,
    /// Also compute the data of all figures when the reference figures are requested.
    pub figures: bool,
}

impl Default for SeparationRequest {
    fn default() -> SeparationRequest {
        SeparationRequest {
            networks: Vec::new(),
            n: Vec::new(),
            d: Vec::new(),
            m: Vec::new(),
            a1: Vec::new(),
            a0: None,
            b: None,
            c: None,
            cross: false,
            bridge: false,
            draws: DRAWS,
            seed: 1,
            figures: false,
        }
    }
}

impl SeparationRequest {
    /// The reference figures.
    pub fn new() -> SeparationRequest {
        SeparationRequest::default()
    }

    /// Default values of omitted lists.
    fn rest(&self) -> Setting {
        let usual = Setting::of(1000);
        let (b, c) = match (self.b, self.c) {
            (None, None) => (usual.b, usual.c),
            (Some(b), None) => (b, 1.0 - b),
            (None, Some(c)) => (1.0 - c, c),
            (Some(b), Some(c)) => (b, c),
        };
        Setting { a0: self.a0.unwrap_or(usual.a0), b, c, cross: self.cross, ..usual }
    }

    /// Whether no network and no setting was given.
    fn is_reference(&self) -> bool {
        let lists = self.networks.is_empty() && self.n.is_empty() && self.d.is_empty() && self.m.is_empty() && self.a1.is_empty();
        lists && self.a0.is_none() && self.b.is_none() && self.c.is_none() && !self.cross && !self.bridge
    }

    fn sweep(&self) -> Result<Sweep, Error> {
        fn or<T: Clone>(list: &[T], usual: T) -> Vec<T> {
            if list.is_empty() { vec![usual] } else { list.to_vec() }
        }
        let rest = self.rest();
        let mut networks = Vec::new();
        for text in &self.networks {
            networks.extend(Network::list(text)?);
        }
        if networks.is_empty() {
            networks = vec![Network::Softmax, Network::Linear];
        }
        let (n, d, a1) = (or(&self.n, rest.n), or(&self.d, rest.d), or(&self.a1, rest.a1));
        Ok(Sweep { networks, n, d, m: self.m.clone(), a1, rest, draws: self.draws, seed: self.seed })
    }

    fn bridge(&self) -> Result<Bridge, Error> {
        let usual = Bridge::default();
        let one = |name: &str, list: &[usize]| match list {
            [] => Ok(None),
            [one] => Ok(Some(*one)),
            _ => Err(Error::Sizes(format!("--bridge varies n and a_1 only; give one {name}, not {}", list.len()))),
        };
        let rest = self.rest();
        Ok(Bridge {
            n: if self.n.is_empty() { usual.n } else { self.n.clone() },
            a1: if self.a1.is_empty() { usual.a1 } else { self.a1.clone() },
            m: one("m", &self.m)?,
            rest: Setting { d: one("d", &self.d)?.unwrap_or(rest.d), ..rest },
            draws: self.draws,
            seed: self.seed,
        })
    }
}

/// Computes in the global thread pool. `progress` receives the number of finished points and their total.
///
/// # Errors
/// If a network or a size cannot be used.
pub fn run(request: &SeparationRequest, progress: &mut dyn FnMut(u64, u64)) -> Result<Separation, Error> {
    let (draws, seed) = (request.draws, request.seed);
    let mut found = Separation { note: RECONSTRUCTION.into(), seed, reference: None, points: Vec::new(), bridge: Vec::new() };
    let mut done = 0;
    let mut count = |_: &super::Point, of: usize| {
        done += 1;
        progress(done, of as u64);
    };
    if request.is_reference() {
        found.reference = Some(Reference::run(draws, seed)?);
        if request.figures {
            found.points = Sweep { draws, seed, ..Sweep::theorem() }.run(&mut count)?;
            found.bridge = Bridge { draws, seed, ..Bridge::default() }.run()?;
        }
    } else if request.bridge {
        if !request.networks.is_empty() {
            return Err(Error::Sizes("the bridge compares Taylor series and powers; leave out the networks".into()));
        }
        found.bridge = request.bridge()?.run()?;
    } else {
        found.points = request.sweep()?.run(&mut count)?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_choose_what_is_computed() {
        let small = SeparationRequest { draws: 50, ..SeparationRequest::new() };
        let run = |request: &SeparationRequest| {
            let mut reported = Vec::new();
            (run(request, &mut |done, of| reported.push((done, of))), reported)
        };
        let (found, reported) = run(&SeparationRequest { n: vec![100, 1000], ..small.clone() });
        assert_eq!((found.expect("points").points.len(), reported), (4, vec![(1, 4), (2, 4), (3, 4), (4, 4)]));
        let found = run(&SeparationRequest { bridge: true, n: vec![100], a1: vec![3.0], ..small.clone() }).0.expect("a bridge");
        assert!(found.points.is_empty() && !found.bridge.is_empty() && found.reference.is_none());
        for wrong in [
            SeparationRequest { bridge: true, d: vec![12, 13], ..small.clone() },
            SeparationRequest { bridge: true, networks: vec!["linear".into()], ..small.clone() },
            SeparationRequest { networks: vec!["lineal".into()], ..small },
        ] {
            assert!(run(&wrong).0.is_err_and(|error| error.is_usage()), "{wrong:?}");
        }
    }
}
