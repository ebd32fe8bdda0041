//! What a call is cut into, and where things lie: tiles, padded rows, splits of time, and the places of heads in the scratch memory.

use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::kernels::basis::Basis;
use crate::kernels::score_rows::Rescale;
use crate::kernels::{PAD, TILE};
use crate::layer::{self, Class};
use crate::parts::distance::Distance;
use crate::parts::gate::PostGate;
use crate::{Error, Inputs, Kernel, Layer, Memory, Shape};

/// Tasks that the backward pass is cut into at least, in its first round. A constant and not the number of threads, since it decides the
/// order of sums.
const TASKS: usize = 64;
/// Tasks that chunks are cut into at least. Fewer, since chunks are equally long and every cut costs: the state at its place has
/// to be computed beforehand.
const SPLITS: usize = 8;

/// The same where values are written one after another: that comes first and has no splits, so that these would mostly compute states twice.
const WRITTEN_SPLITS: usize = 2;

/// Parts of time that run at once, of a batch row with so many chunks; `written` where a write rule comes before.
pub fn splits(shape: &Shape, chunks: usize, written: bool) -> usize {
    let wanted = if written { WRITTEN_SPLITS } else { SPLITS };
    wanted.div_ceil(shape.batch * shape.kv_heads).min(chunks)
}

/// Time cut into parts of whole tiles, each time from 0 to the end.
pub(crate) struct Cuts {
    /// In tiles.
    pub tiles: Vec<usize>,
    /// In positions, up to T.
    pub positions: Vec<usize>,
    /// In positions, up to the end of the last tile.
    pub padded: Vec<usize>,
    /// In parts.
    pub numbers: Vec<usize>,
}

impl Cuts {
    fn new(tiles: Vec<usize>, tile: usize, time: usize) -> Cuts {
        let padded: Vec<usize> = tiles.iter().map(|at| at * tile).collect();
        Cuts { positions: padded.iter().map(|&at| at.min(time)).collect(), numbers: (0..tiles.len()).collect(), padded, tiles }
    }

    /// Parts.
    pub fn count(&self) -> usize {
        self.tiles.len() - 1
    }

    /// The tiles of a part.
    pub fn tiles(&self, part: usize) -> Range<usize> {
        self.tiles[part]..self.tiles[part + 1]
    }
}

/// Rows of q or k that one task norms.
pub const NORMED_ROWS: usize = 64;

/// One head, ready to run.
pub(crate) struct Head {
    plan: layer::Head,
    /// Its kernel, with learned coefficients taken in.
    pub kernel: Kernel,
    /// a_n of its polynomial, with learned coefficients taken in; empty where it is none.
    pub coefficients: Vec<f64>,
    /// How rows are kept within float32. States have no log scale, hence chunks have none.
    pub rescale: Rescale,
    /// Whether it has a state from chunk to chunk instead of looking at all keys.
    pub chunked: bool,
}

impl Deref for Head {
    type Target = layer::Head;

    fn deref(&self) -> &layer::Head {
        &self.plan
    }
}

/// Heads that run in chunks and share a state; see [`crate::layer::StateGroup`].
pub(crate) struct ChunkGroup {
    /// Whether its state holds far keys alone.
    pub far: bool,
    /// The distance from which on keys are in the state, and the tiles by which they enter it later than without a window.
    pub distance: Distance,
    pub lag: usize,
    /// Its kv head.
    pub g: usize,
    /// Its heads.
    pub heads: Vec<usize>,
    /// The class of its keys.
    pub class: usize,
    /// The monomials of its kernel.
    pub basis: Arc<Basis>,
    /// Whether a denominator needs z.
    pub sums: bool,
    /// Whether its heads (then only one) have a decay, of all rows alike or by channel.
    pub decays: bool,
    pub channels: bool,
    /// Whether keys have weights, the same for all its heads.
    pub weighs_keys: bool,
    /// Where its state lies among those of its kv head.
    pub at: usize,
    /// Values of its state: H [N, ep], then z [N] where there is one, in whole vectors.
    pub len: usize,
}

/// The groups of the heads that run in chunks, and the values of the states of a kv head, at most.
fn chunk_groups(layer: &Layer, heads: &[Head], far: &[Option<Head>], tile: usize, ep: usize) -> Result<(Vec<ChunkGroup>, usize), Error> {
    let (mut groups, mut at, mut most): (Vec<ChunkGroup>, usize, usize) = (Vec::new(), 0, 0);
    let chunked = |h: usize| heads[h].chunked || far[h].as_ref().is_some_and(|far| far.chunked);
    for group in layer.state_plan(Memory::Natural).groups.iter().filter(|group| chunked(group.heads[0])) {
        let Some((class, moments)) = group.remembered() else { continue };
        let basis = layer.basis(class, &moments.orders)?;
        let rows = basis.rows();
        let len = rows * ep + if moments.sums { rows.next_multiple_of(PAD) } else { 0 };
        // Groups are in the order of their heads, hence of their kv heads.
        at = if groups.last().is_some_and(|last| last.g == group.g) { at } else { 0 };
        let (far, distance) = (group.moments.is_none(), group.distance);
        let lag = if far { (distance.window - 1).div_ceil(tile) } else { 0 };
        groups.push(ChunkGroup {
            far,
            distance,
            lag,
            g: group.g,
            heads: group.heads.clone(),
            class,
            basis,
            sums: moments.sums,
            decays: moments.decays,
            channels: moments.channels,
            weighs_keys: moments.weighs_keys,
            at,
            len,
        });
        at += len;
        most = most.max(at);
    }
    Ok((groups, most))
}

/// Sizes and offsets of one attention in its scratch memory.
pub(crate) struct Layout {
    /// What it computes.
    pub layer: Layer,
    /// Sizes of the call.
    pub shape: Shape,
    /// One for each head: how it weighs its near keys, which are all where there is no window.
    pub heads: Vec<Head>,
    /// How it weighs its far keys, where it sees any.
    pub far: Vec<Option<Head>>,
    /// Ways in which keys are prepared.
    pub classes: Vec<Class>,
    /// Positions of a tile, at most [`TILE`].
    pub tile: usize,
    /// Those in whole vectors.
    pub pitch: usize,
    /// T in tiles.
    pub tiles: usize,
    /// Where tiles start, and T.
    pub tile_cuts: Vec<usize>,
    /// The most numbers of q and k that meet in a score, and those in whole vectors.
    pub width: usize,
    pub dp: usize,
    /// e in whole vectors.
    pub ep: usize,
    /// Width of the short convolution, 0 for none.
    pub taps: usize,
    /// Parts of time in the backward pass of heads that see all keys; none where there is no such head.
    pub parts: Cuts,
    /// The heads that have a state, by what they share.
    pub groups: Vec<ChunkGroup>,
    /// Tiles of a chunk.
    pub chunk_tiles: usize,
    /// Parts of time whose chunks run at once; 0 where no head runs in chunks.
    pub splits: usize,
    /// The same as cuts.
    pub split_cuts: Cuts,
    /// When keys enter states, for each lag.
    pub lags: Vec<(usize, Cuts)>,
    /// Values of the states of a kv head, at most.
    pub state_len: usize,
}

impl Layout {
    /// Values of q and of k that are normed: those of each of the layer's sources, [sources, B, T, heads·d].
    pub fn normed_lens(&self) -> [usize; 2] {
        let [q, k, _] = self.shape.widths();
        [q, k].map(|width| self.layer.norm_sources().count() * self.shape.rows() * width)
    }

    /// Values that going back through norms of q and k needs: a row and a gradient of the weights for each piece.
    pub fn norm_room(&self) -> usize {
        if self.layer.qk_norm().is_some() { self.shape.rows().div_ceil(NORMED_ROWS) * 2 * self.shape.widths()[0] } else { 0 }
    }

    /// Plans a call. `chunk` gives the length of chunks and says which heads use them.
    pub fn new(layer: &Layer, shape: Shape, chunk: Option<(usize, &[bool])>) -> Result<Layout, Error> {
        // The heads that run in chunks have a state of all keys, or of far keys alone.
        let head = |h: usize, plan: &layer::Head, remembered: bool| {
            let chunked = remembered && !plan.variant.is_walked() && chunk.is_some_and(|(_, chunked)| chunked[h]);
            Head {
                plan: plan.clone(),
                kernel: plan.kernel.clone(),
                coefficients: plan.kernel.polynomial().into_iter().flatten().map(|(_, a)| a).collect(),
                rescale: if chunked { Rescale::None } else { plan.rescale },
                chunked,
            }
        };
        let far: Vec<Option<Head>> =
            layer.far_plans().iter().enumerate().map(|(h, plan)| plan.as_ref().map(|plan| head(h, plan, true))).collect();
        let heads: Vec<Head> =
            layer.head_plans().iter().enumerate().map(|(h, plan)| head(h, plan, plan.variant.window.is_none())).collect();
        // A chunk is a whole number of tiles; one of 200 positions is two tiles of 100.
        let chunk = chunk.map_or(TILE, |(length, _)| length.clamp(1, shape.time));
        let chunk_tiles = chunk.div_ceil(TILE);
        let tile = chunk.div_ceil(chunk_tiles);
        let tiles = shape.time.div_ceil(tile);
        let width = layer.classes().iter().map(|class| class.width).max().unwrap_or(shape.d);
        let (dp, ep) = (width.next_multiple_of(PAD), shape.e.next_multiple_of(PAD));
        let (groups, state_len) = chunk_groups(layer, &heads, &far, tile, ep)?;
        let pairs = shape.batch * shape.kv_heads;
        let parts = if heads.iter().any(|head| !head.chunked) { TASKS.div_ceil(pairs).min(tiles) } else { 0 };
        let mut layout = Layout {
            layer: layer.clone(),
            shape,
            heads,
            far,
            classes: layer.classes().to_vec(),
            tile,
            pitch: tile.next_multiple_of(PAD),
            tiles,
            tile_cuts: (0..=tiles).map(|i| (i * tile).min(shape.time)).collect(),
            width,
            dp,
            ep,
            taps: layer.taps(),
            parts: Cuts::new((0..=parts).map(|i| i * tiles / parts.max(1)).collect(), tile, shape.time),
            splits: match groups.is_empty() {
                true => 0,
                // States of splits are added up with one factor for all rows.
                false if layer.decays_by_channel() => 1,
                false => splits(&shape, tiles.div_ceil(chunk_tiles), layer.writes()),
            },
            split_cuts: Cuts::new(vec![0], tile, shape.time),
            lags: Vec::new(),
            groups,
            chunk_tiles,
            state_len,
        };
        let ends = (0..layout.splits).map(|split| (layout.split(split).end * chunk_tiles).min(tiles));
        layout.split_cuts = Cuts::new(std::iter::once(0).chain(ends).collect(), tile, shape.time);
        layout.lags = layout.find_lags();
        // The states of all splits must be addressable, too.
        let states =
            layout.splits.max(1).checked_mul(pairs).and_then(|n| n.checked_mul(state_len)).filter(|&n| n <= isize::MAX as usize / 4);
        states.map(|_| layout).ok_or(Error::Memory { values: usize::MAX, bytes: 4 })
    }

    /// Positions for which there are rows: T, and the last tile in whole vectors.
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

    /// How head h weighs its near or its far keys, which it has.
    pub fn pass(&self, h: usize, far: bool) -> &Head {
        match &self.far[h] {
            Some(head) if far => head,
            _ => &self.heads[h],
        }
    }

    /// How often queries are prepared: for near keys, and for far keys where any head sees them.
    pub fn passes(&self) -> usize {
        1 + self.far.iter().any(Option::is_some) as usize
    }

    /// Every way in which head h weighs keys.
    pub fn passes_of(&self, h: usize) -> impl Iterator<Item = &Head> {
        std::iter::once(&self.heads[h]).chain(&self.far[h])
    }

    /// Values of the tensors with which any class is prepared, of one head; 0 where all are plain.
    pub fn tensor_len(&self) -> usize {
        self.classes.iter().map(|class| class.tensor_len(self.shape.d)).max().unwrap_or(0)
    }

    /// Whether any head takes one position after another.
    pub fn has_walked_heads(&self) -> bool {
        self.heads.iter().any(|head| head.variant.is_walked())
    }

    /// Whether a kv head has keys of this class.
    pub fn group_has_class(&self, g: usize, class: usize) -> bool {
        let group = self.shape.group();
        (g * group..(g + 1) * group).flat_map(|h| self.passes_of(h)).any(|head| head.class == class)
    }

    /// Learned coefficients of each head that has any, for near or for far keys.
    pub fn learned(&self, far: bool) -> usize {
        self.layer.learned(far)
    }

    /// Whether head h has a state from chunk to chunk, of all keys or of far keys.
    pub fn runs_in_chunks(&self, h: usize) -> bool {
        self.passes_of(h).any(|head| head.chunked)
    }

    /// The first tile whose keys are not in the state of far keys before a chunk, with this lag.
    pub fn frontier(&self, chunk: usize, lag: usize) -> usize {
        (chunk * self.chunk_tiles).saturating_sub(lag)
    }

    /// The tiles that enter a state after a chunk.
    pub fn entering(&self, chunk: usize, lag: usize) -> Range<usize> {
        self.frontier(chunk, lag)..((chunk + 1) * self.chunk_tiles).min(self.tiles).saturating_sub(lag)
    }

    /// The first position that meets the keys of this tile in a state of far keys.
    pub fn met_in_state_from(&self, tile: usize, lag: usize) -> usize {
        ((tile + lag) / self.chunk_tiles + 1) * self.chunk_len()
    }

    /// The lags of all groups, each once, with the parts of time whose keys enter states in each split; the last has also those that enter none.
    fn find_lags(&self) -> Vec<(usize, Cuts)> {
        let mut lags: Vec<usize> = self.groups.iter().map(|group| group.lag).collect();
        lags.sort_unstable();
        lags.dedup();
        let cuts = |lag: usize| {
            let mut tiles: Vec<usize> = self.split_cuts.tiles.iter().map(|&at| at.saturating_sub(lag)).collect();
            tiles.iter_mut().last().into_iter().for_each(|end| *end = self.tiles);
            (lag, Cuts::new(tiles, self.tile, self.shape.time))
        };
        lags.into_iter().map(cuts).collect()
    }

    /// Chunks of a batch row.
    pub fn chunks(&self) -> usize {
        self.tiles.div_ceil(self.chunk_tiles)
    }

    /// Positions of a chunk, of which those from T or a row's length on do not count.
    pub fn chunk_len(&self) -> usize {
        self.chunk_tiles * self.tile
    }

    /// The chunks of a split.
    pub fn split(&self, split: usize) -> Range<usize> {
        let boundary = |i: usize| i * self.chunks() / self.splits;
        boundary(split)..boundary(split + 1)
    }

    /// The tiles of a chunk.
    pub fn tiles_of(&self, chunk: usize) -> Range<usize> {
        chunk * self.chunk_tiles..((chunk + 1) * self.chunk_tiles).min(self.tiles)
    }

    /// The first position after the chunk of a tile.
    pub fn chunk_end(&self, tile: usize) -> usize {
        (tile / self.chunk_tiles + 1) * self.chunk_len()
    }

    /// a_n/α! of each head that runs in chunks, by row of its basis; empty for the others.
    pub fn factors(&self) -> Vec<Vec<f32>> {
        let mut factors = vec![Vec::new(); self.heads.len()];
        for (group, h) in self.groups.iter().flat_map(|group| group.heads.iter().map(move |&h| (group, h))) {
            fill_factors(&mut factors[h], group, &self.pass(h, group.far).coefficients);
        }
        factors
    }

    /// Takes the learned coefficients of a call in.
    pub fn bind(&mut self, inputs: &Inputs<f32>, factors: &mut [Vec<f32>]) {
        for h in 0..self.heads.len() {
            self.layer.bind(h, inputs, &mut self.heads[h].kernel);
            if let Some(far) = &mut self.far[h] {
                self.layer.bind_far(h, inputs, &mut far.kernel);
            }
        }
        for head in self.heads.iter_mut().chain(self.far.iter_mut().flatten()).filter(|head| head.learned > 0) {
            if let Kernel::Taylor(taylor) = &head.kernel {
                head.coefficients.iter_mut().zip(taylor.orders()).for_each(|(a, &n)| *a = taylor.coefficient(n));
            }
        }
        for (group, &h) in self.groups.iter().flat_map(|group| group.heads.iter().map(move |h| (group, h))) {
            let head = self.pass(h, group.far);
            if head.learned > 0 {
                fill_factors(&mut factors[h], group, &head.coefficients);
            }
        }
    }

    /// The groups of a kv head.
    pub fn groups_of(&self, g: usize) -> impl Iterator<Item = &ChunkGroup> {
        self.groups.iter().filter(move |group| group.g == g)
    }

    /// Whether any head sees all keys.
    pub fn has_parallel_heads(&self) -> bool {
        self.parts.count() > 0
    }

    /// Whether any head has a post gate by channel.
    pub fn has_post_channels(&self) -> bool {
        self.heads.iter().any(|head| head.variant.post_gate.as_ref().is_some_and(PostGate::by_channel))
    }

    /// Whether any gate, decay or key weight has to be computed.
    pub fn has_gates(&self) -> bool {
        self.heads.iter().any(|head| head.has_gates())
    }
}

fn fill_factors(factors: &mut Vec<f32>, group: &ChunkGroup, coefficients: &[f64]) {
    factors.clear();
    for (i, a) in coefficients.iter().enumerate() {
        factors.extend(group.basis.inverse_factorials()[group.basis.order_range(i)].iter().map(|x| (a * *x as f64) as f32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_splits_cover_every_tile_once() {
        for time in [1, 64, 65, 1000, 32_768] {
            let shape = Shape { batch: 1, time, heads: 2, kv_heads: 1, d: 8, e: 8 };
            let layer = |text: &str| crate::Layer::new(2, 1, 8).variant(text).expect("possible");
            let layout = Layout::new(&layer("exp rope=off"), shape, None).expect("possible");
            let covered: Vec<usize> = (0..layout.parts.count()).flat_map(|part| layout.parts.tiles(part)).collect();
            assert_eq!(covered, (0..layout.tiles).collect::<Vec<_>>(), "T = {time}");
            for length in [1, 7, 64, 200, 300, 100_000] {
                let layout = Layout::new(&layer("taylor=0..2 rope=off"), shape, Some((length, &[true; 2]))).expect("possible");
                let covered: Vec<usize> = (0..layout.splits).flat_map(|s| layout.split(s)).flat_map(|c| layout.tiles_of(c)).collect();
                assert_eq!(covered, (0..layout.tiles).collect::<Vec<_>>(), "T = {time}, chunks of {length}");
                assert_eq!((layout.tile_cuts.len(), layout.split_cuts.positions.last()), (layout.tiles + 1, Some(&time)));
                assert!(layout.tile <= TILE && layout.tiles * layout.tile >= time && layout.tp() >= time);
            }
        }
    }
}
