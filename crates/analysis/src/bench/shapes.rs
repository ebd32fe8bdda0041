//! Parsing of shape lists.

use crate::Error;

/// B rows, H heads, T positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Batch rows, B.
    pub batch: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Positions, T.
    pub time: usize,
}

/// y [M, N] = x [M, K] · W [N, K]ᵀ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    /// Rows of x.
    pub m: usize,
    /// Inner dimension.
    pub k: usize,
    /// Rows of W.
    pub n: usize,
}

/// A shape of three sizes.
pub trait Sizes3: Sized {
    /// The accepted form.
    const EXPECTED: &'static str;
    /// From three nonzero sizes.
    fn from_sizes(sizes: [usize; 3]) -> Self;
}

impl Sizes3 for AttentionShape {
    const EXPECTED: &'static str = "batch x heads x time, three positive numbers such as 8x4x256, several separated by commas";
    fn from_sizes([batch, heads, time]: [usize; 3]) -> Self {
        AttentionShape { batch, heads, time }
    }
}

impl Sizes3 for GemmShape {
    const EXPECTED: &'static str = "M x K x N, three positive numbers such as 2048x256x512, several separated by commas";
    fn from_sizes([m, k, n]: [usize; 3]) -> Self {
        GemmShape { m, k, n }
    }
}

/// Shapes separated by commas.
pub fn parse_shapes<S: Sizes3>(list: &str) -> Result<Vec<S>, Error> {
    list.split(',')
        .map(|text| {
            let sizes: Option<Vec<usize>> = text.trim().split(['x', '×']).map(|n| n.trim().parse().ok().filter(|&n| n > 0)).collect();
            match sizes.and_then(|sizes| <[usize; 3]>::try_from(sizes).ok()) {
                // Products of sizes and bytes stay within the address space.
                Some(sizes) if sizes.iter().all(|&n| n <= 1 << 20) => Ok(S::from_sizes(sizes)),
                Some(_) => Err(Error::Sizes(format!("`{}`: sizes above {} are not measured here", text.trim(), 1 << 20))),
                None => Err(Error::ShapeText { text: text.trim().to_string(), expected: S::EXPECTED }),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_and_mistakes_named() {
        let shapes = parse_shapes::<AttentionShape>("8x4x256, 2×4×1024").expect("shapes");
        assert_eq!(shapes, [AttentionShape { batch: 8, heads: 4, time: 256 }, AttentionShape { batch: 2, heads: 4, time: 1024 }]);
        for text in ["", "8x4", "8x4x0", "8x4x2x1", "axbxc", "8x4x256,", "-1x2x3"] {
            assert!(matches!(parse_shapes::<GemmShape>(text), Err(Error::ShapeText { .. })), "{text}");
        }
        assert!(matches!(parse_shapes::<GemmShape>("2x3x99999999"), Err(Error::Sizes(_))));
    }
}
