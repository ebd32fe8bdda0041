//! The state of a layer between tokens.
//!
//! Each state group of each batch row has a memory. If the kernel is a polynomial it is a recurrent state, H [N, ep] and, if the denominator sums,
//! z [N]. Otherwise it is a KV cache: of all keys, or of the keys of a window.

use std::sync::Arc;

use crate::layer::{StateGroup, StatePlan};
use crate::state::block::QuerySums;
use crate::state::kv_cache::KvCache;
use crate::state::ring::RingKvCache;
use crate::state::token::{StepState, TokenParams};
use crate::{Buffer, Error, Kernel, Layer, Shape, StateKind, Variant};
use termwise_kernels::PAD;
use termwise_kernels::basis::Basis;
use termwise_kernels::score_rows::Rescale;
use termwise_kernels::simd::{Simd, Task, dispatch};
use termwise_kernels::task_scratch::TaskScratch;

/// The memory of one layer, for all its batch rows and heads, in float32.
///
/// Built empty; [`State::step`] processes one token. A recurrent state and the cache of a window have a fixed size, other caches grow with the tokens.
///
/// ```
/// use termwise_attention::{Inputs, Layer};
///
/// let layer = Layer::new(2, 1, 4).variant("taylor=0..2 rope=off")?;
/// let mut state = layer.state(1)?;
/// let (q, k, v) = ([0.1; 8], [0.2; 4], [0.3; 4]);
/// let mut y = [0.0; 8];
/// for _ in 0..3 {
///     state.step(&Inputs::new(&q, &k, &v), &mut y)?;
/// }
/// assert!(y.iter().all(|y| (y - 0.3).abs() < 1e-6));
/// assert_eq!(state.position(0), Some(3));
/// # Ok::<(), termwise_attention::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct State {
    pub(crate) layer: Layer,
    /// Kernels with their learned coefficients, per head.
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) far_kernels: Vec<Option<Kernel>>,
    /// Shape of the inputs of one token.
    pub(crate) shape: Shape,
    pub(crate) memory: StateKind,
    /// Per state group; `None` without a recurrent state.
    pub(crate) bases: Vec<Option<Arc<Basis>>>,
    /// Per head, for its queries, and for the keys of a write rule.
    pub(crate) tables: Vec<Table>,
    pub(crate) key_tables: Vec<Table>,
    /// [B, groups]
    pub(crate) groups: Vec<GroupState>,
    pub(crate) steps: StepState,
    pub(crate) token: TokenParams,
    pub(crate) tasks: TaskScratch,
}

/// The state of one state group of one batch row, and the results of its last token.
#[derive(Clone, Debug)]
pub(crate) struct GroupState {
    pub memory: GroupMemory,
    /// The largest ‖k‖ of prepared keys so far.
    pub key_norm: f32,
    /// The last U [heads of the group, ep].
    pub u: Vec<f32>,
    /// The last z and ρ of each head.
    pub rows: Vec<HeadSums>,
    /// Scratch memory for the sums over a cache.
    pub sums: Vec<QuerySums>,
    /// In addition to a cache: far keys.
    pub far: Option<FarState>,
}

impl GroupState {
    /// Allocates memory for `more` keys.
    pub fn reserve(&mut self, more: usize) -> Result<(), Error> {
        match &mut self.memory {
            GroupMemory::Recurrent { .. } => Ok(()),
            GroupMemory::Cache(cache) => cache.reserve(more),
            GroupMemory::Ring(ring) => ring.reserve(more),
        }
    }

    /// H and z, of all keys or of far keys.
    pub fn recurrent(&self) -> Option<(&Buffer, &Buffer)> {
        match (&self.memory, &self.far) {
            (GroupMemory::Recurrent { h, z }, _) | (_, Some(FarState { h, z, .. })) => Some((h, z)),
            _ => None,
        }
    }

    /// Like [`GroupState::recurrent`], mutable.
    pub fn recurrent_mut(&mut self) -> Option<(&mut Buffer, &mut Buffer)> {
        match (&mut self.memory, &mut self.far) {
            (GroupMemory::Recurrent { h, z }, _) | (_, Some(FarState { h, z, .. })) => Some((h, z)),
            _ => None,
        }
    }

    fn bytes(&self) -> usize {
        let memory = match &self.memory {
            GroupMemory::Recurrent { h, z } => h.bytes() + z.bytes(),
            GroupMemory::Cache(cache) => cache.bytes(),
            GroupMemory::Ring(ring) => ring.bytes(),
        };
        memory + self.far.as_ref().map_or(0, |far| far.h.bytes() + far.z.bytes())
    }

    fn clear(&mut self) {
        self.key_norm = 0.0;
        if let Some((h, z)) = self.recurrent_mut() {
            h.fill(0.0);
            z.fill(0.0);
        }
        match &mut self.memory {
            GroupMemory::Recurrent { .. } => {}
            GroupMemory::Cache(cache) => cache.clear(),
            GroupMemory::Ring(ring) => ring.clear(),
        }
    }
}

/// Past keys of a state group.
#[derive(Clone, Debug)]
pub(crate) enum GroupMemory {
    /// The recurrent state of a kernel with a finite feature map.
    Recurrent {
        /// [N, ep]
        h: Buffer,
        /// [N], or empty.
        z: Buffer,
    },
    /// All keys and values.
    Cache(KvCache),
    /// The keys and values of a window.
    Ring(RingKvCache),
}

/// The recurrent state of far keys, H [N, ep] and z [N], both empty if far keys are in the cache; and the last U [heads of the group, ep] over them.
#[derive(Clone, Debug)]
pub(crate) struct FarState {
    pub h: Buffer,
    pub z: Buffer,
    pub u: Vec<f32>,
}

/// Results of a state group for one of its heads, in addition to U.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadSums {
    pub z: f32,
    pub rho: f32,
    /// Bound of |x| at this token.
    pub largest: f32,
}

/// a_n/α! of each row of a head's basis, without a_n if that is learned; empty for caches.
pub(crate) type Table = Arc<Vec<f32>>;

impl Layer {
    /// The empty state of B batch rows: of constant size if possible, otherwise a cache.
    pub fn state(&self, batch: usize) -> Result<State, Error> {
        self.state_with(batch, StateKind::Auto)
    }

    /// The empty state of B batch rows, of this kind.
    pub fn state_with(&self, batch: usize, memory: StateKind) -> Result<State, Error> {
        let shape = self.shape(batch, 1)?;
        let plan = self.state_plan(memory);
        let basis =
            |group: &StateGroup| group.remembered().map(|(key_transform, spec)| self.basis(key_transform, &spec.orders)).transpose();
        let bases: Vec<Option<Arc<Basis>>> = plan.groups.iter().map(basis).collect::<Result<_, _>>()?;
        let ep = shape.e.next_multiple_of(PAD);
        let key_transforms = self.key_transforms();
        let group_state = |(group, basis): (&StateGroup, &Option<Arc<Basis>>)| -> Result<GroupState, Error> {
            let heads = group.heads.len();
            let (h, z) = match (basis, group.remembered()) {
                (Some(basis), Some((_, spec))) => {
                    (Buffer::zeros(basis.rows() * ep)?, Buffer::zeros(if spec.sums { basis.rows() } else { 0 })?)
                }
                _ => (Buffer::default(), Buffer::default()),
            };
            let (memory, far) = match (&group.recurrent, group.layout) {
                (Some(_), _) => (GroupMemory::Recurrent { h, z }, None),
                (None, layout) => {
                    let memory = match layout {
                        Some(layout) => GroupMemory::Ring(RingKvCache::new(group, key_transforms, [shape.e, ep], layout)),
                        None => GroupMemory::Cache(KvCache::of_group(group, key_transforms, ep)),
                    };
                    (memory, group.far.is_some().then(|| FarState { h, z, u: vec![0.0; heads * ep] }))
                }
            };
            let (rows, sums) = (vec![HeadSums::default(); heads], vec![QuerySums::new(Rescale::None, None); heads]);
            Ok(GroupState { memory, key_norm: 0.0, u: vec![0.0; heads * ep], rows, sums, far })
        };
        // Allocated first: its size grows with the batch, and a batch that is too large fails here.
        let (steps, token) = (StepState::new(self, &shape)?, TokenParams::new(self, &shape)?);
        let groups = (0..batch).flat_map(|_| plan.groups.iter().zip(&bases).map(group_state)).collect::<Result<_, _>>()?;
        Ok(State {
            kernels: self.heads().iter().map(|variant| variant.near.kernel.clone()).collect(),
            far_kernels: self.far_plans().iter().map(|far| far.as_ref().map(|far| far.kernel.clone())).collect(),
            layer: self.clone(),
            steps,
            token,
            shape,
            memory,
            tables: tables(self, plan, &bases, |_| Some(1.0)),
            key_tables: tables(self, plan, &bases, |variant| Some(variant.write?.scale)),
            bases,
            groups,
            tasks: TaskScratch::default(),
        })
    }
}

impl State {
    /// The layer that it belongs to.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// The variants of its heads.
    pub fn heads(&self) -> &[Variant] {
        self.layer.heads()
    }

    /// Number of batch rows.
    pub fn batch(&self) -> usize {
        self.shape.batch
    }

    /// The requested kind of memory.
    pub fn memory(&self) -> StateKind {
        self.memory
    }

    /// Number of positions that a batch row has processed; `None` if there is no such row.
    pub fn position(&self, row: usize) -> Option<usize> {
        self.steps.positions.get(row).copied()
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.groups.iter().map(GroupState::bytes).sum::<usize>() + self.steps.bytes()
    }

    /// Whether its size is independent of the number of tokens.
    pub fn is_constant(&self) -> bool {
        let groups = &self.plan().groups;
        self.bases.iter().zip(groups).all(|(basis, group)| basis.is_some() || group.distance.window < usize::MAX)
    }

    /// An upper bound of all scores |x| of this head so far: the maximum itself if keys are cached, otherwise
    /// |scale|·‖q‖·max ‖k‖ (Cauchy–Schwarz). `None` if there is no such row or head.
    pub fn largest_score(&self, row: usize, head: usize) -> Option<f64> {
        let score = self.steps.scores.get(row.checked_mul(self.shape.heads)?.checked_add(head)?);
        score.filter(|_| head < self.shape.heads).map(|&score| score as f64)
    }

    /// Resets to the empty state. Memory remains allocated.
    pub fn clear(&mut self) {
        self.groups.iter_mut().for_each(GroupState::clear);
        self.steps.clear();
    }

    pub(crate) fn plan(&self) -> &StatePlan {
        self.layer.state_plan(self.memory)
    }
}

/// scale^n·a_n/α!, without a_n if it is learned, for each head with a recurrent state and a scale; heads with equal tables share them.
fn tables(layer: &Layer, plan: &StatePlan, bases: &[Option<Arc<Basis>>], scale: impl Fn(&Variant) -> Option<f64>) -> Vec<Table> {
    let mut known: Vec<(&Kernel, f64, &Arc<Basis>, Table)> = Vec::new();
    let mut tables = Vec::with_capacity(plan.group_of.len());
    for (h, &(group, _)) in plan.group_of.iter().enumerate() {
        let (Some(basis), Some(scale)) = (&bases[group], scale(&layer.heads()[h])) else {
            tables.push(Table::default());
            continue;
        };
        let head = layer.far_plans()[h].as_ref().unwrap_or(&layer.head_plans()[h]);
        let same = |(kernel, other, of, _): &&(&Kernel, f64, &Arc<Basis>, Table)| {
            **kernel == head.kernel && *other == scale && Arc::ptr_eq(basis, of)
        };
        if let Some((.., table)) = known.iter().find(same) {
            tables.push(table.clone());
            continue;
        }
        let mut table = basis.wide_inverse_factorials();
        for (i, (n, a)) in head.kernel.polynomial().into_iter().flatten().enumerate() {
            let factor = scale.powi(n as i32) * if head.learned > 0 { 1.0 } else { a };
            table[basis.order_range(i)].iter_mut().for_each(|c| *c *= factor);
        }
        let table = Table::new(table.into_iter().map(|c| c as f32).collect());
        known.push((&head.kernel, scale, basis, table.clone()));
        tables.push(table);
    }
    tables
}

/// A key that enters a recurrent state: its weight, and its decay since its position.
pub(crate) struct EnteringKey<'a> {
    pub key: &'a [f32],
    /// [ep]
    pub value: &'a [f32],
    pub weight: f32,
    pub decay: f32,
}

impl EnteringKey<'_> {
    /// Values of scratch memory that [`EnteringKey::enter`] takes.
    pub fn scratch_len(basis: &Basis) -> usize {
        basis.lower_order_rows() + basis.rows()
    }

    /// H += weight·decay·K·vᵀ, z += decay·K.
    pub fn enter(&self, basis: &Basis, h: &mut [f32], z: &mut [f32], scratch: &mut [f32]) {
        let (lower_orders, rows) = scratch.split_at_mut(basis.lower_order_rows());
        let rows = &mut rows[..basis.rows()];
        basis.of_one(self.key, lower_orders, rows);
        dispatch(Add { entering: self, h, z, rows });
    }
}

/// [`EnteringKey::enter`] with the monomials of the key.
struct Add<'a> {
    entering: &'a EnteringKey<'a>,
    h: &'a mut [f32],
    z: &'a mut [f32],
    rows: &'a [f32],
}

impl Task for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let EnteringKey { value, weight, decay, .. } = *self.entering;
        for (h, &k) in self.h.chunks_exact_mut(value.len()).zip(self.rows) {
            let k = k * (weight * decay);
            h.iter_mut().zip(value).for_each(|(h, &v)| *h += k * v);
        }
        self.z.iter_mut().zip(self.rows).for_each(|(z, &k)| *z += decay * k);
    }
}
