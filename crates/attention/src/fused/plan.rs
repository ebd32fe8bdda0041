//! Where things lie: tiles, padded rows, and the places of heads in the workspace.

use std::ops::Range;

use crate::fused::state_group::{Unit, units};
use crate::kernels::score_rows::Rescale;
use crate::kernels::{PAD, TILE};
use crate::parts::kernel::feature::Map;
use crate::{Error, Kernel, Shape, Variant};

/// Tasks that chunks are cut into at least. A constant and not the number of threads, since it decides the order of sums; and few, since every
/// cut costs: the state at its place has to be computed beforehand.
const SPANS: usize = 8;

/// Parts that run at the same time, of a batch row with so many chunks.
pub fn spans(shape: &Shape, chunks: usize) -> usize {
    SPANS.div_ceil(shape.batch * shape.kv_heads).min(chunks)
}

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
    /// How rows are kept within float32. States have no frame, hence chunks have none.
    pub frame: Rescale,
    /// Whether keys have weights: an input gate or a position denominator.
    pub weighs_keys: bool,
    /// Learned coefficients.
    pub learned: usize,
    /// Whether it carries a state from chunk to chunk instead of looking at all keys.
    pub chunked: bool,
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
    /// Positions of a tile, at most [`TILE`].
    pub tile: usize,
    /// Those in whole vectors.
    pub pitch: usize,
    /// T in tiles.
    pub tiles: usize,
    /// d in whole vectors.
    pub dp: usize,
    /// e in whole vectors.
    pub ep: usize,
    /// Width of the short convolution, 0 for none.
    pub taps: usize,
    /// The heads that carry a state, by what they share.
    pub units: Vec<Unit>,
    /// Tiles of a chunk.
    pub chunk_tiles: usize,
    /// Parts into which the chunks of a batch row are cut, to run at the same time.
    pub spans: usize,
    /// Values of the states of one batch row.
    pub state_len: usize,
}

impl Layout {
    /// Plans the heads of a layer; variants are checked before. `chunk` gives the length of chunks and says which heads use them.
    pub fn new(variants: &[Variant], shape: Shape, chunk: Option<(usize, &[bool])>) -> Result<Layout, Error> {
        let mut classes: Vec<Class> = Vec::new();
        let heads: Vec<Head> = variants
            .iter()
            .enumerate()
            .map(|(h, variant)| {
                let class = Class { rope: variant.rope, conv: variant.conv.is_some(), map: variant.kernel.map() };
                let index = classes.iter().position(|other| *other == class).unwrap_or_else(|| {
                    classes.push(class);
                    classes.len() - 1
                });
                let chunked = chunk.is_some_and(|(_, chunked)| chunked[h]);
                Head {
                    kernel: variant.kernel.clone(),
                    class: index,
                    scale: variant.scale_for(shape.d) as f32,
                    clamp: variant.clamp.map_or(f32::INFINITY, |c| c as f32),
                    frame: if chunked { Rescale::None } else { variant.rescale() },
                    weighs_keys: variant.in_gate.is_some() || variant.denominator.key_side(),
                    learned: variant.learned(),
                    chunked,
                    variant: variant.clone(),
                }
            })
            .collect();
        // A chunk is a whole number of tiles; one of 200 positions is two tiles of 100.
        let chunk = chunk.map_or(TILE, |(length, _)| length.clamp(1, shape.time));
        let chunk_tiles = chunk.div_ceil(TILE);
        let tile = chunk.div_ceil(chunk_tiles);
        let tiles = shape.time.div_ceil(tile);
        let (dp, ep) = (shape.d.next_multiple_of(PAD), shape.e.next_multiple_of(PAD));
        let (units, state_len) = units(&heads, &shape, ep)?;
        Ok(Layout {
            shape,
            heads,
            classes,
            tile,
            pitch: tile.next_multiple_of(PAD),
            tiles,
            dp,
            ep,
            taps: variants.iter().find_map(|v| v.conv).unwrap_or(0),
            spans: if units.is_empty() { 0 } else { spans(&shape, tiles.div_ceil(chunk_tiles)) },
            units,
            chunk_tiles,
            state_len,
        })
    }

    /// Positions for which rows have room: T, and the last tile in whole vectors.
    pub fn tp(&self) -> usize {
        ((self.tiles - 1) * self.tile + self.pitch).next_multiple_of(PAD)
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

    /// Whether some heads see all keys.
    pub fn parallel(&self) -> bool {
        self.heads.iter().any(|head| !head.chunked)
    }

    /// Chunks of a batch row.
    pub fn chunks(&self) -> usize {
        self.tiles.div_ceil(self.chunk_tiles)
    }

    /// Positions of a chunk, of which those from T or a row's length on do not count.
    pub fn chunk_len(&self) -> usize {
        self.chunk_tiles * self.tile
    }

    /// The chunks of a span.
    pub fn span(&self, span: usize) -> Range<usize> {
        let boundary = |i: usize| i * self.chunks() / self.spans;
        boundary(span)..boundary(span + 1)
    }

    /// The span of a tile.
    pub fn span_of(&self, tile: usize) -> usize {
        let chunk = tile / self.chunk_tiles;
        (0..self.spans).find(|&span| self.span(span).contains(&chunk)).unwrap_or(0)
    }

    /// The tiles of a chunk.
    pub fn tiles_of(&self, chunk: usize) -> Range<usize> {
        chunk * self.chunk_tiles..((chunk + 1) * self.chunk_tiles).min(self.tiles)
    }

    /// The first position behind the chunk of a tile.
    pub fn chunk_end(&self, tile: usize) -> usize {
        (tile / self.chunk_tiles + 1) * self.chunk_len()
    }

    /// a_n/α! of each head that runs in chunks, by row of its basis; empty for the others.
    pub fn factors(&self) -> Vec<Vec<f32>> {
        let mut factors = vec![Vec::new(); self.heads.len()];
        for unit in &self.units {
            for &h in &unit.heads {
                let polynomial = self.heads[h].kernel.polynomial().unwrap_or_default();
                let inverse = unit.basis.inverse_factorials();
                let orders = polynomial.iter().enumerate();
                factors[h] =
                    orders.flat_map(|(i, (_, a))| inverse[unit.basis.span(i)].iter().map(move |x| (a * *x as f64) as f32)).collect();
            }
        }
        factors
    }

    /// The units of a kv head.
    pub fn units_of(&self, g: usize) -> impl Iterator<Item = &Unit> {
        self.units.iter().filter(move |unit| unit.g == g)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_every_tile_once() {
        for time in [1, 64, 65, 1000, 32_768] {
            let shape = Shape { batch: 1, time, heads: 2, kv_heads: 1, d: 8, e: 8 };
            let variant: Variant = "taylor=0..2".parse().expect("possible");
            for length in [1, 7, 64, 200, 300, 100_000] {
                let layout = Layout::new(&vec![variant.clone(); 2], shape, Some((length, &[true; 2]))).expect("possible");
                let covered: Vec<usize> = (0..layout.spans).flat_map(|s| layout.span(s)).flat_map(|c| layout.tiles_of(c)).collect();
                assert_eq!(covered, (0..layout.tiles).collect::<Vec<_>>(), "T = {time}, chunks of {length}");
                assert!(layout.tile <= TILE && layout.tiles * layout.tile >= time && layout.tp() >= time);
            }
        }
    }
}
