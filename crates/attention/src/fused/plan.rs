//! The plan of a call: tiles, padded rows, splits of time, and offsets of heads in the scratch memory.

use std::ops::Range;
use std::sync::Arc;

pub(in crate::fused) use crate::layer::HeadPlan;
use crate::layer::KeyTransform;
use crate::parts::distance::Distance;
use crate::parts::gate::PostGate;
use crate::{AuxKind, Error, Inputs, Kernel, KeyRange, Layer, Shape, StateKind};
use termwise_kernels::basis::Basis;
use termwise_kernels::score_rows::Rescale;
use termwise_kernels::{PAD, TILE};

/// Minimum number of tasks in the first round of the backward pass. It is not the number of threads, since it fixes the order of sums.
const TASKS: usize = 64;
/// Minimum number of tasks in chunk mode. It is smaller, since chunks are equally long and the state at each boundary is computed in advance.
const SPLITS: usize = 8;

/// The same with a write rule, which runs first and without splits: more splits would mostly compute states twice.
const WRITTEN_SPLITS: usize = 2;

/// Splits of a batch row with this many chunks; `written` if a write rule runs before.
pub fn splits(shape: &Shape, chunks: usize, written: bool) -> usize {
    let wanted = if written { WRITTEN_SPLITS } else { SPLITS };
    wanted.div_ceil(shape.batch * shape.kv_heads).min(chunks)
}

/// Boundaries that divide time into parts of whole tiles, from 0 to the end.
pub(crate) struct TimeParts {
    /// In tiles.
    pub tiles: Vec<usize>,
    /// In positions, up to T.
    pub positions: Vec<usize>,
    /// In positions, up to the end of the last tile.
    pub padded: Vec<usize>,
    /// In parts.
    pub numbers: Vec<usize>,
}

impl TimeParts {
    fn new(tiles: Vec<usize>, tile: usize, time: usize) -> TimeParts {
        let padded: Vec<usize> = tiles.iter().map(|at| at * tile).collect();
        TimeParts { positions: padded.iter().map(|&at| at.min(time)).collect(), numbers: (0..tiles.len()).collect(), padded, tiles }
    }

    /// Number of parts.
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

/// Heads that run in chunks and share a state; see [`crate::layer::StateGroup`].
pub(crate) struct ChunkGroup {
    /// The branch whose keys its state contains: far keys only, or all keys.
    pub range: KeyRange,
    /// The distance beyond which keys are in the state, and the number of tiles by which they enter later than without a window.
    pub distance: Distance,
    pub lag: usize,
    /// Its kv head.
    pub g: usize,
    /// Its heads.
    pub heads: Vec<usize>,
    /// Index of the key transform of its keys.
    pub key_transform: usize,
    /// The monomials of its kernel.
    pub basis: Arc<Basis>,
    /// Whether a denominator needs z.
    pub sums: bool,
    /// Whether its head has a decay, one for all rows or per channel. A group with a decay has one head.
    pub decays: bool,
    pub channels: bool,
    /// Whether keys have weights, the same for all its heads.
    pub weighs_keys: bool,
    /// Offset of its state among those of its kv head.
    pub at: usize,
    /// Values of its state: H [N, ep], then z [N] if a denominator sums, padded to whole vectors.
    pub len: usize,
}

/// The groups of the heads that run in chunks, and the maximum number of values of the states of a kv head.
fn chunk_groups(
    layer: &Layer,
    heads: &[HeadPlan],
    far: &[Option<HeadPlan>],
    tile: usize,
    ep: usize,
) -> Result<(Vec<ChunkGroup>, usize), Error> {
    let (mut groups, mut at, mut most): (Vec<ChunkGroup>, usize, usize) = (Vec::new(), 0, 0);
    let chunked = |h: usize| heads[h].chunked || far[h].as_ref().is_some_and(|far| far.chunked);
    for group in layer.state_plan(StateKind::Auto).groups.iter().filter(|group| chunked(group.heads[0])) {
        let Some((transform, spec)) = group.remembered() else { continue };
        let basis = layer.basis(transform, &spec.orders)?;
        let rows = basis.rows();
        let len = rows * ep + if spec.sums { rows.next_multiple_of(PAD) } else { 0 };
        // Groups are in the order of their heads, hence of their kv heads.
        at = if groups.last().is_some_and(|last| last.g == group.g) { at } else { 0 };
        let (range, distance) = (if group.recurrent.is_none() { KeyRange::Far } else { KeyRange::Near }, group.distance);
        let lag = if range.is_far() { (distance.window - 1).div_ceil(tile) } else { 0 };
        groups.push(ChunkGroup {
            range,
            distance,
            lag,
            g: group.g,
            heads: group.heads.clone(),
            key_transform: transform,
            basis,
            sums: spec.sums,
            decays: spec.decays,
            channels: spec.channels,
            weighs_keys: spec.weighs_keys,
            at,
            len,
        });
        at += len;
        most = most.max(at);
    }
    Ok((groups, most))
}

/// The plan of calls of one shape: heads, sizes, tiles and offsets in the scratch memory.
pub(crate) struct CallPlan {
    /// The layer.
    pub layer: Layer,
    /// Sizes of the call.
    pub shape: Shape,
    /// Whether the products of tiles run in bfloat16; see [`CallPlan::admits_bf16`].
    pub bf16: bool,
    /// The near branch of each head, which sees all keys without a window.
    pub heads: Vec<HeadPlan>,
    /// The far branch of each head that has one.
    pub far: Vec<Option<HeadPlan>>,
    /// The key transforms of the layer.
    pub key_transforms: Vec<KeyTransform>,
    /// Positions of a tile, at most [`TILE`].
    pub tile: usize,
    /// The same padded to whole vectors.
    pub pitch: usize,
    /// T in tiles.
    pub tiles: usize,
    /// Starts of the tiles, and T.
    pub tile_bounds: Vec<usize>,
    /// The largest width of prepared q and k, and the same padded to whole vectors.
    pub width: usize,
    pub dp: usize,
    /// e padded to whole vectors.
    pub ep: usize,
    /// Width of the short convolution, 0 for none.
    pub taps: usize,
    /// Parts of time in the backward pass of heads that see all keys; empty if there is no such head.
    pub parts: TimeParts,
    /// The heads that run in chunks, grouped by the state that they share.
    pub groups: Vec<ChunkGroup>,
    /// Tiles of a chunk.
    pub chunk_tiles: usize,
    /// Parts of time whose chunks run in parallel; 0 if no head runs in chunks.
    pub splits: usize,
    /// The same as boundaries.
    pub split_parts: TimeParts,
    /// For each lag, when keys enter states.
    pub lags: Vec<(usize, TimeParts)>,
    /// Maximum number of values of the states of a kv head.
    pub state_len: usize,
    /// a_n/α! of each head that runs in chunks, per row of its basis; empty for the others.
    pub factors: Vec<Vec<f32>>,
}

impl CallPlan {
    /// Number of values of q and of k after the norm, for each of the layer's sources: [sources, B, T, heads·d].
    pub fn normed_lens(&self) -> [usize; 2] {
        let [q, k, _] = self.shape.widths();
        [q, k].map(|width| self.layer.norm_sources().count() * self.shape.rows() * width)
    }

    /// Number of values that the backward pass of the QK norm needs: a row and a weight gradient for each piece.
    pub fn norm_room(&self) -> usize {
        if self.layer.qk_norm().is_some() { self.shape.rows().div_ceil(NORMED_ROWS) * 2 * self.shape.widths()[0] } else { 0 }
    }

    /// Plans a call. `chunk` is the length of chunks and the heads that use them.
    pub fn new(layer: &Layer, shape: Shape, chunk: Option<(usize, &[bool])>) -> Result<CallPlan, Error> {
        // Heads that run in chunks have a state of all keys, or of far keys. States have no log scale, so chunks have none.
        let head = |h: usize, branch: &HeadPlan, remembered: bool| {
            let chunked = remembered && !branch.variant.is_sequential() && chunk.is_some_and(|(_, chunked)| chunked[h]);
            HeadPlan { chunked, rescale: if chunked { Rescale::None } else { branch.rescale }, ..branch.clone() }
        };
        let far: Vec<Option<HeadPlan>> =
            layer.far_plans().iter().enumerate().map(|(h, branch)| branch.as_ref().map(|branch| head(h, branch, true))).collect();
        let heads: Vec<HeadPlan> =
            layer.head_plans().iter().enumerate().map(|(h, branch)| head(h, branch, branch.variant.window.is_none())).collect();
        // A chunk is a whole number of tiles; one of 200 positions is two tiles of 100.
        let chunk = chunk.map_or(TILE, |(length, _)| length.clamp(1, shape.time));
        let chunk_tiles = chunk.div_ceil(TILE);
        let tile = chunk.div_ceil(chunk_tiles);
        let tiles = shape.time.div_ceil(tile);
        let width = layer.key_transforms().iter().map(|transform| transform.width).max().unwrap_or(shape.d);
        let (dp, ep) = (width.next_multiple_of(PAD), shape.e.next_multiple_of(PAD));
        let (groups, state_len) = chunk_groups(layer, &heads, &far, tile, ep)?;
        let pairs = shape.batch * shape.kv_heads;
        let parts = if heads.iter().any(|head| !head.chunked) { TASKS.div_ceil(pairs).min(tiles) } else { 0 };
        let mut plan = CallPlan {
            layer: layer.clone(),
            shape,
            bf16: false,
            heads,
            far,
            key_transforms: layer.key_transforms().to_vec(),
            tile,
            pitch: tile.next_multiple_of(PAD),
            tiles,
            tile_bounds: (0..=tiles).map(|i| (i * tile).min(shape.time)).collect(),
            width,
            dp,
            ep,
            taps: layer.taps(),
            parts: TimeParts::new((0..=parts).map(|i| i * tiles / parts.max(1)).collect(), tile, shape.time),
            splits: match groups.is_empty() {
                true => 0,
                // States of splits are added with one factor for all rows.
                false if layer.decays_by_channel() => 1,
                false => splits(&shape, tiles.div_ceil(chunk_tiles), layer.writes()),
            },
            split_parts: TimeParts::new(vec![0], tile, shape.time),
            lags: Vec::new(),
            groups,
            chunk_tiles,
            state_len,
            factors: Vec::new(),
        };
        let ends = (0..plan.splits).map(|split| (plan.split(split).end * chunk_tiles).min(tiles));
        plan.split_parts = TimeParts::new(std::iter::once(0).chain(ends).collect(), tile, shape.time);
        plan.lags = plan.find_lags();
        plan.factors = plan.find_factors();
        // The states of all splits must be addressable.
        let states = plan.splits.max(1).checked_mul(pairs).and_then(|n| n.checked_mul(state_len)).filter(|&n| n <= isize::MAX as usize / 4);
        states.map(|_| plan).ok_or(Error::Memory { values: usize::MAX, bytes: 4 })
    }

    /// Positions that have rows: T, with the last tile padded to whole vectors.
    pub fn tp(&self) -> usize {
        ((self.tiles - 1) * self.tile + self.pitch).next_multiple_of(PAD)
    }

    /// B·H rows of heads, head (b, h) at b·H + h.
    pub fn head_count(&self) -> usize {
        self.shape.batch * self.shape.heads
    }

    /// Number of prepared kv heads: key transforms × B × G.
    pub fn kv_count(&self) -> usize {
        self.key_transforms.len() * self.shape.batch * self.shape.kv_heads
    }

    /// Index of kv head g of batch row b in a key transform.
    pub fn kv_index(&self, transform: usize, b: usize, g: usize) -> usize {
        (transform * self.shape.batch + b) * self.shape.kv_heads + g
    }

    /// The near or the far branch of head h.
    pub fn branch(&self, h: usize, range: KeyRange) -> &HeadPlan {
        match &self.far[h] {
            Some(head) if range.is_far() => head,
            _ => &self.heads[h],
        }
    }

    /// Number of branches: 2 if any head sees far keys.
    pub fn branches(&self) -> usize {
        1 + self.far.iter().any(Option::is_some) as usize
    }

    /// The branches of head h.
    pub fn branches_of(&self, h: usize) -> impl Iterator<Item = &HeadPlan> {
        std::iter::once(&self.heads[h]).chain(&self.far[h])
    }

    /// Maximum number of parameters of projections and learned features per head; 0 if no key transform has any.
    pub fn tensor_len(&self) -> usize {
        self.key_transforms.iter().map(|transform| transform.tensor_len(self.shape.d)).max().unwrap_or(0)
    }

    /// Whether any head is evaluated sequentially.
    pub fn has_sequential_heads(&self) -> bool {
        self.heads.iter().any(|head| head.variant.is_sequential())
    }

    /// Whether a kv head has keys of this key transform.
    pub fn group_has_transform(&self, g: usize, transform: usize) -> bool {
        let group = self.shape.group();
        (g * group..(g + 1) * group).flat_map(|h| self.branches_of(h)).any(|head| head.key_transform == transform)
    }

    /// Learned coefficients of each head that has any, for near or for far keys.
    pub fn learned(&self, range: KeyRange) -> usize {
        self.layer.learned(range)
    }

    /// Whether head h has a state between chunks, of all keys or of far keys.
    pub fn runs_in_chunks(&self, h: usize) -> bool {
        self.branches_of(h).any(|head| head.chunked)
    }

    /// The first tile whose keys are not in the state of far keys before a chunk, with this lag.
    pub fn frontier(&self, chunk: usize, lag: usize) -> usize {
        (chunk * self.chunk_tiles).saturating_sub(lag)
    }

    /// The tiles that enter a state after a chunk.
    pub fn entering(&self, chunk: usize, lag: usize) -> Range<usize> {
        self.frontier(chunk, lag)..((chunk + 1) * self.chunk_tiles).min(self.tiles).saturating_sub(lag)
    }

    /// The first position that reads the keys of this tile from a state of far keys.
    pub fn met_in_state_from(&self, tile: usize, lag: usize) -> usize {
        ((tile + lag) / self.chunk_tiles + 1) * self.chunk_len()
    }

    /// The distinct lags of all groups, with the parts of time whose keys enter states in each split. The last part also has the keys that enter none.
    fn find_lags(&self) -> Vec<(usize, TimeParts)> {
        let mut lags: Vec<usize> = self.groups.iter().map(|group| group.lag).collect();
        lags.sort_unstable();
        lags.dedup();
        let cuts = |lag: usize| {
            let mut tiles: Vec<usize> = self.split_parts.tiles.iter().map(|&at| at.saturating_sub(lag)).collect();
            tiles.iter_mut().last().into_iter().for_each(|end| *end = self.tiles);
            (lag, TimeParts::new(tiles, self.tile, self.shape.time))
        };
        lags.into_iter().map(cuts).collect()
    }

    /// Chunks of a batch row.
    pub fn chunks(&self) -> usize {
        self.tiles.div_ceil(self.chunk_tiles)
    }

    /// Positions of a chunk, including padding.
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

    fn find_factors(&self) -> Vec<Vec<f32>> {
        let mut factors = vec![Vec::new(); self.heads.len()];
        for (group, h) in self.groups.iter().flat_map(|group| group.heads.iter().map(move |&h| (group, h))) {
            fill_factors(&mut factors[h], group, &self.branch(h, group.range).coefficients);
        }
        factors
    }

    /// Binds the learned coefficients of a call.
    pub fn bind(&mut self, inputs: &Inputs<f32>) {
        for h in 0..self.heads.len() {
            self.layer.bind(h, KeyRange::Near, inputs, &mut self.heads[h].kernel);
            if let Some(far) = &mut self.far[h] {
                self.layer.bind(h, KeyRange::Far, inputs, &mut far.kernel);
            }
        }
        for head in self.heads.iter_mut().chain(self.far.iter_mut().flatten()).filter(|head| head.learned > 0) {
            if let Kernel::Taylor(taylor) = &head.kernel {
                head.coefficients.iter_mut().zip(taylor.orders()).for_each(|(a, &n)| *a = taylor.coefficient(n));
            }
        }
        let CallPlan { groups, heads, far, factors, .. } = self;
        for (group, &h) in groups.iter().flat_map(|group| group.heads.iter().map(move |h| (group, h))) {
            let head = far[h].as_ref().filter(|_| group.range.is_far()).unwrap_or(&heads[h]);
            if head.learned > 0 {
                fill_factors(&mut factors[h], group, &head.coefficients);
            }
        }
    }

    /// The groups of a kv head.
    pub fn groups_of(&self, g: usize) -> impl Iterator<Item = &ChunkGroup> {
        self.groups.iter().filter(move |group| group.g == g)
    }

    /// Whether the products of tiles may run in bfloat16: e^x and polynomials up to order 2 of all keys. Powers of scores above order 2 amplify their rounding
    /// errors. Recurrent states, written values and decays per channel stay in float32.
    pub fn admits_bf16(&self) -> bool {
        let low_order = |head: &HeadPlan| head.kernel.polynomial().is_none_or(|orders| orders.iter().all(|&(n, _)| n <= 2));
        let plain =
            self.groups.is_empty() && self.far.iter().all(Option::is_none) && !self.layer.writes() && !self.layer.decays_by_channel();
        plain && self.heads.iter().all(|head| low_order(head) && !head.variant.is_sequential())
    }

    /// Whether any head sees all keys.
    pub fn has_parallel_heads(&self) -> bool {
        self.parts.count() > 0
    }

    /// Whether any head runs in chunks.
    pub fn has_chunked_heads(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Whether any head sees far keys.
    pub fn has_far_keys(&self) -> bool {
        self.far.iter().any(Option::is_some)
    }

    /// Whether any head has parameters that its epilogue reads: a norm with weights, or a learned sink.
    pub fn has_epilogue_parameters(&self) -> bool {
        let kinds = [AuxKind::Sink, AuxKind::NormWeight, AuxKind::NormBias];
        self.heads.iter().any(|head| kinds.into_iter().any(|kind| head.variant.needs(kind)))
    }

    /// Whether any kernel has learned coefficients.
    pub fn learns_coefficients(&self) -> bool {
        KeyRange::ALL.into_iter().any(|range| self.learned(range) > 0)
    }

    /// Whether any head has a post gate per channel.
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
            let plan = CallPlan::new(&layer("exp rope=off"), shape, None).expect("possible");
            let covered: Vec<usize> = (0..plan.parts.count()).flat_map(|part| plan.parts.tiles(part)).collect();
            assert_eq!(covered, (0..plan.tiles).collect::<Vec<_>>(), "T = {time}");
            for length in [1, 7, 64, 200, 300, 100_000] {
                let plan = CallPlan::new(&layer("taylor=0..2 rope=off"), shape, Some((length, &[true; 2]))).expect("possible");
                let covered: Vec<usize> = (0..plan.splits).flat_map(|s| plan.split(s)).flat_map(|c| plan.tiles_of(c)).collect();
                assert_eq!(covered, (0..plan.tiles).collect::<Vec<_>>(), "T = {time}, chunks of {length}");
                assert_eq!((plan.tile_bounds.len(), plan.split_parts.positions.last()), (plan.tiles + 1, Some(&time)));
                assert!(plan.tile <= TILE && plan.tiles * plan.tile >= time && plan.tp() >= time);
            }
        }
    }
}
