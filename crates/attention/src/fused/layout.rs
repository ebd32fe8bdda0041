//! Where things lie: tiles, padded rows, and the places of heads in the workspace.

use crate::parts::feature::Map;
use crate::{Kernel, Shape, Variant};

/// Queries and keys of a tile. Measured: 128 keys leave the first-level cache (64 KB at dimension 64), but the second feeds the
/// products fast enough, and longer rows share the cost of their maximum and their sums; 64 and 96 are 5 % slower.
pub const TILE: usize = 128;
/// Rows of a tile that are finished together, while their scores are still in the first-level cache.
pub const ROWS: usize = 12;
/// Rows are padded to whole vectors of the widest kind.
pub const PAD: usize = 16;
/// Tasks that the backward pass is cut into at least. A constant and not the number of threads: where tasks share a sum,
/// their number decides its order.
const TASKS: usize = 16;

/// How keys and values are prepared; heads that agree in it share the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Class {
    /// RoPE on q and k.
    pub rope: bool,
    /// Short convolution on q, k and v.
    pub conv: bool,
    /// φ on q and k.
    pub map: Map,
}

/// One head, ready to run.
pub struct Head {
    /// Its parts.
    pub variant: Variant,
    /// Its kernel, with learned coefficients taken in.
    pub kernel: Kernel,
    /// Index of its [`Class`].
    pub class: usize,
    /// What q is multiplied by.
    pub scale: f32,
    /// Upper bound of scores.
    pub clamp: f32,
    /// Whether the row maximum is subtracted.
    pub shift: bool,
    /// Whether keys have weights: an input gate or a position denominator.
    pub weighs_keys: bool,
    /// Learned coefficients.
    pub learned: usize,
}

impl Head {
    /// Whether any gate, decay or key weight has to be computed.
    pub fn has_signals(&self) -> bool {
        let v = &self.variant;
        self.weighs_keys || v.out_gate.is_some() || v.post_gate.is_some() || v.decay.is_some()
    }
}

/// Sizes and offsets of one attention in the workspace.
pub struct Layout {
    /// Sizes of the call.
    pub shape: Shape,
    /// One for each head.
    pub heads: Vec<Head>,
    /// Ways in which keys are prepared.
    pub classes: Vec<Class>,
    /// T in whole tiles.
    pub tiles: usize,
    /// d in whole vectors.
    pub dp: usize,
    /// e in whole vectors.
    pub ep: usize,
    /// Width of the short convolution, 0 for none.
    pub taps: usize,
    /// Parts into which the key tiles of a kv head are cut in the backward pass.
    pub segments: usize,
}

impl Layout {
    /// Plans the heads of a layer; variants are checked before.
    pub fn new(variants: &[Variant], shape: Shape) -> Layout {
        let mut classes: Vec<Class> = Vec::new();
        let heads = variants
            .iter()
            .map(|variant| {
                let class = Class { rope: variant.rope, conv: variant.conv.is_some(), map: variant.kernel.map() };
                let index = classes.iter().position(|other| *other == class).unwrap_or_else(|| {
                    classes.push(class);
                    classes.len() - 1
                });
                Head {
                    kernel: variant.kernel.clone(),
                    class: index,
                    scale: variant.scale_for(shape.d) as f32,
                    clamp: variant.clamp.map_or(f32::INFINITY, |c| c as f32),
                    shift: variant.shifts(),
                    weighs_keys: variant.in_gate.is_some() || variant.denominator.key_side(),
                    learned: variant.learned(),
                    variant: variant.clone(),
                }
            })
            .collect();
        let tiles = shape.time.div_ceil(TILE);
        Layout {
            shape,
            heads,
            classes,
            tiles,
            dp: shape.d.next_multiple_of(PAD),
            ep: shape.e.next_multiple_of(PAD),
            taps: variants.iter().find_map(|v| v.conv).unwrap_or(0),
            segments: TASKS.div_ceil(shape.batch * shape.kv_heads).min(tiles),
        }
    }

    /// T padded to whole tiles.
    pub fn tp(&self) -> usize {
        self.tiles * TILE
    }

    /// B·H rows of heads, head (b, h) at b·H + h.
    pub fn head_count(&self) -> usize {
        self.shape.batch * self.shape.heads
    }

    /// Number of prepared kv heads: classes × B × G.
    pub fn kv_count(&self) -> usize {
        self.classes.len() * self.shape.batch * self.shape.kv_heads
    }

    /// Index of kv head g of batch row b in a class.
    pub fn kv_index(&self, class: usize, b: usize, g: usize) -> usize {
        (class * self.shape.batch + b) * self.shape.kv_heads + g
    }

    /// Channels of q, k and v.
    pub fn channels(&self) -> [usize; 3] {
        let s = &self.shape;
        [s.heads * s.d, s.kv_heads * s.d, s.kv_heads * s.e]
    }

    /// Learned coefficients of each head that has any.
    pub fn learned(&self) -> usize {
        self.heads.iter().map(|head| head.learned).max().unwrap_or(0)
    }

    /// The key tiles of a segment. Early tiles are seen by more queries, so segments hold equal areas of the triangle.
    pub fn segment(&self, segment: usize) -> std::ops::Range<usize> {
        let boundary = |i: usize| {
            let rest = 1.0 - (1.0 - i as f64 / self.segments as f64).sqrt();
            if i == self.segments { self.tiles } else { (rest * self.tiles as f64).round() as usize }
        };
        boundary(segment)..boundary(segment + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_every_tile_once() {
        for time in [1, 64, 65, 1000, 32_768] {
            let shape = Shape { batch: 1, time, heads: 2, kv_heads: 1, d: 8, e: 8 };
            let layout = Layout::new(&vec![Variant::default(); 2], shape);
            let covered: Vec<usize> = (0..layout.segments).flat_map(|s| layout.segment(s)).collect();
            assert_eq!(covered, (0..layout.tiles).collect::<Vec<_>>(), "T = {time}");
        }
    }
}
