//! What a layer keeps between tokens.
//!
//! A state has a memory for each state group of each batch row. Where the kernel is a polynomial it holds moments, H [N, ep] and, where
//! the denominator sums, z [N]; elsewhere a cache of keys and values.

use std::sync::Arc;

use crate::kernels::PAD;
use crate::kernels::basis::Basis;
use crate::kernels::score_rows::Rescale;
use crate::kernels::simd::{Simd, Task, dispatch};
use crate::layer::{StateGroup, StatePlan};
use crate::state::cache::{Cache, Sums};
use crate::state::pool::Pool;
use crate::state::step_state::StepState;
use crate::state::token::Token;
use crate::task_scratch::TaskScratch;
use crate::{Buffer, Error, Kernel, Layer, Memory, Shape, Variant};

/// The memory of one layer, for all its batch rows and heads, in float32.
///
/// Built empty; [`State::step`] takes one token in. The size of moments does not change, caches grow with the tokens.
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
    /// Kernels, with learned coefficients taken in.
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) far_kernels: Vec<Option<Kernel>>,
    /// With one position.
    pub(crate) shape: Shape,
    pub(crate) memory: Memory,
    /// Of each state group; `None` for caches.
    pub(crate) bases: Vec<Option<Arc<Basis>>>,
    /// Of each head, for its queries and, where it has a write rule, for keys that read.
    pub(crate) tables: Vec<Table>,
    pub(crate) key_tables: Vec<Table>,
    /// [B, groups]
    pub(crate) stores: Vec<Store>,
    pub(crate) steps: StepState,
    pub(crate) token: Token,
    pub(crate) tasks: TaskScratch,
}

/// The memory of one state group of one batch row.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub memory: GroupMemory,
    /// The largest ‖k‖ of prepared keys so far.
    pub key_norm: f32,
    /// The last U [heads of the group, ep].
    pub u: Vec<f32>,
    /// The last z and ρ of each head.
    pub rows: Vec<HeadSums>,
    /// Scratch for the sums of a cache.
    pub sums: Vec<Sums>,
    /// Beside a cache: far keys.
    pub far: Option<FarMemory>,
}

impl Store {
    /// Makes room for so many keys more.
    pub fn reserve(&mut self, more: usize) -> Result<(), Error> {
        match &mut self.memory {
            GroupMemory::Moments { .. } => Ok(()),
            GroupMemory::Cache(cache) => cache.reserve(more),
            GroupMemory::Pool(pool) => pool.reserve(more),
        }
    }

    /// Places of a pool that keep what their keys received.
    pub fn receiving(&self) -> usize {
        if let GroupMemory::Pool(pool) = &self.memory { pool.received.len() } else { 0 }
    }

    /// H and z, of all keys or of far keys.
    pub fn moments(&self) -> Option<(&Buffer, &Buffer)> {
        match (&self.memory, &self.far) {
            (GroupMemory::Moments { h, z }, _) | (_, Some(FarMemory { h, z, .. })) => Some((h, z)),
            _ => None,
        }
    }

    /// The same, to be changed.
    pub fn moments_mut(&mut self) -> Option<(&mut Buffer, &mut Buffer)> {
        match (&mut self.memory, &mut self.far) {
            (GroupMemory::Moments { h, z }, _) | (_, Some(FarMemory { h, z, .. })) => Some((h, z)),
            _ => None,
        }
    }
}

/// The far keys of a state group: H [N, ep] and z [N], empty where they stay in the cache; and the last U [heads of the group, ep] over them.
#[derive(Clone, Debug)]
pub(crate) struct FarMemory {
    pub h: Buffer,
    pub z: Buffer,
    pub u: Vec<f32>,
}

impl FarMemory {
    /// A key enters, with the weight and the decay that it has by now.
    pub fn enter(&mut self, basis: &Basis, key: &[f32], value: &[f32], weight: f32, decay: f32) {
        let (mut lower_orders, mut rows) = (vec![0.0; basis.lower_order_rows()], vec![0.0; basis.rows()]);
        basis.of_one(key, &mut lower_orders, &mut rows);
        dispatch(Add { h: &mut self.h, z: &mut self.z, rows: &rows, value, weight: weight * decay, decay });
    }
}

/// What a state group gives for one of its heads besides U.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadSums {
    pub z: f32,
    pub rho: f32,
    /// Bound of |x| at this token.
    pub largest: f32,
}

/// a_n/α! of each row of a head's basis, without a_n where that is learned; empty for caches.
pub(crate) type Table = Arc<Vec<f32>>;

#[derive(Clone, Debug)]
pub(crate) enum GroupMemory {
    Moments {
        /// [N, ep]
        h: Buffer,
        /// [N], or empty.
        z: Buffer,
    },
    Cache(Cache),
    Pool(Pool),
}

impl Layer {
    /// The empty state of B batch rows: of constant size where that is possible, a cache elsewhere.
    pub fn state(&self, batch: usize) -> Result<State, Error> {
        self.state_with(batch, Memory::Natural)
    }

    /// The empty state of B batch rows, of this kind.
    pub fn state_with(&self, batch: usize, memory: Memory) -> Result<State, Error> {
        self.check_fused()?;
        let shape = self.shape(batch, 1)?;
        let plan = self.state_plan(memory);
        let basis = |group: &StateGroup| group.remembered().map(|(class, moments)| self.basis(class, &moments.orders)).transpose();
        let bases: Vec<Option<Arc<Basis>>> = plan.groups.iter().map(basis).collect::<Result<_, _>>()?;
        let ep = shape.e.next_multiple_of(PAD);
        let classes = self.classes();
        let store = |(group, basis): (&StateGroup, &Option<Arc<Basis>>)| -> Result<Store, Error> {
            let moments = || -> Result<(Buffer, Buffer), Error> {
                match (basis, group.remembered()) {
                    (Some(basis), Some((_, moments))) => {
                        Ok((Buffer::zeros(basis.rows() * ep)?, Buffer::zeros(if moments.sums { basis.rows() } else { 0 })?))
                    }
                    _ => Ok((Buffer::default(), Buffer::default())),
                }
            };
            let heads = group.heads.len();
            let mut far = None;
            let memory = if group.moments.is_some() {
                let (h, z) = moments()?;
                GroupMemory::Moments { h, z }
            } else if let Some(places) = group.places {
                if group.far.is_some() {
                    let (h, z) = moments()?;
                    far = Some(FarMemory { h, z, u: vec![0.0; heads * ep] });
                }
                GroupMemory::Pool(Pool::new(shape.d, shape.e, ep, places))
            } else {
                let near = classes[group.class].width;
                let own = group.far.as_ref().filter(|far| far.class != group.class).map_or(0, |far| classes[far.class].width);
                let mut cache = Cache::new(near + own, ep, heads, group.distance);
                if let Some(kind) = &group.far {
                    let (h, z) = moments()?;
                    far = Some(FarMemory { h, z, u: vec![0.0; heads * ep] });
                    (cache.far_row, cache.far_in_state) = (if own > 0 { near } else { 0 }, kind.moments.is_some());
                }
                GroupMemory::Cache(cache)
            };
            let (rows, sums) = (vec![HeadSums::default(); heads], vec![Sums::new(Rescale::None, None); heads]);
            Ok(Store { memory, key_norm: 0.0, u: vec![0.0; heads * ep], rows, sums, far })
        };
        // What every row has takes the most: where it cannot be had, neither can the rows themselves.
        let (steps, token) = (StepState::new(self, &shape)?, Token::new(self, &shape)?);
        let stores = (0..batch).flat_map(|_| plan.groups.iter().zip(&bases).map(store)).collect::<Result<_, _>>()?;
        Ok(State {
            kernels: self.heads().iter().map(|variant| variant.kernel.clone()).collect(),
            far_kernels: self.far_plans().iter().map(|far| far.as_ref().map(|far| far.kernel.clone())).collect(),
            layer: self.clone(),
            steps,
            token,
            shape,
            memory,
            tables: tables(self, plan, &bases, |_| Some(1.0)),
            key_tables: tables(self, plan, &bases, |variant| Some(variant.write?.scale)),
            bases,
            stores,
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

    /// Batch rows.
    pub fn batch(&self) -> usize {
        self.shape.batch
    }

    /// What it was asked to consist of.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Positions that a batch row has seen; `None` where there is no such row.
    pub fn position(&self, row: usize) -> Option<usize> {
        self.steps.positions.get(row).copied()
    }

    /// Bytes of all memories and of what else is kept, from the buffers that hold them.
    pub fn bytes(&self) -> usize {
        let memory = |store: &Store| match &store.memory {
            GroupMemory::Moments { h, z } => h.bytes() + z.bytes(),
            GroupMemory::Cache(cache) => cache.bytes(),
            GroupMemory::Pool(pool) => pool.bytes(),
        };
        let far = |store: &Store| store.far.as_ref().map_or(0, |far| far.h.bytes() + far.z.bytes());
        self.stores.iter().map(|store| memory(store) + far(store)).sum::<usize>() + self.steps.bytes()
    }

    /// Whether its size does not grow with the tokens.
    pub fn is_constant(&self) -> bool {
        let groups = &self.plan().groups;
        self.bases.iter().zip(groups).all(|(basis, group)| basis.is_some() || group.distance.window < usize::MAX)
    }

    /// A number that no score |x| of this head so far exceeds: the largest itself where keys are kept, elsewhere
    /// |scale|·‖q‖·max ‖k‖, which is no smaller by the inequality of Cauchy and Schwarz. `None` where there is no such row or head.
    pub fn largest_score(&self, row: usize, head: usize) -> Option<f64> {
        let score = self.steps.scores.get(row.checked_mul(self.shape.heads)?.checked_add(head)?);
        score.filter(|_| head < self.shape.heads).map(|&score| score as f64)
    }

    /// Forgets everything: as newly built. Memory stays allocated.
    pub fn clear(&mut self) {
        for store in &mut self.stores {
            store.key_norm = 0.0;
            if let Some(far) = &mut store.far {
                far.h.fill(0.0);
                far.z.fill(0.0);
            }
            match &mut store.memory {
                GroupMemory::Moments { h, z } => {
                    h.fill(0.0);
                    z.fill(0.0);
                }
                GroupMemory::Cache(cache) => cache.clear(),
                GroupMemory::Pool(pool) => pool.clear(),
            }
        }
        self.steps.clear();
    }

    pub(crate) fn plan(&self) -> &StatePlan {
        self.layer.state_plan(self.memory)
    }

    /// The cache of a head and the head's place in it.
    pub(crate) fn cache_of(&self, b: usize, h: usize) -> Option<(&Cache, usize)> {
        let plan = self.plan();
        let (group, column) = plan.group_of[h];
        match &self.stores[b * plan.groups.len() + group].memory {
            GroupMemory::Cache(cache) => Some((cache, column)),
            GroupMemory::Moments { .. } | GroupMemory::Pool(_) => None,
        }
    }
}

/// scale^n·a_n/α!, without a_n where that is learned, for each head with moments and a scale; heads with the same numbers share them.
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

/// H += weight·K·vᵀ, z += decay·K.
pub(crate) struct Add<'a> {
    pub h: &'a mut [f32],
    pub z: &'a mut [f32],
    pub rows: &'a [f32],
    pub value: &'a [f32],
    pub weight: f32,
    pub decay: f32,
}

impl Task for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (h, &k) in self.h.chunks_exact_mut(self.value.len()).zip(self.rows) {
            let k = k * self.weight;
            h.iter_mut().zip(self.value).for_each(|(h, &v)| *h += k * v);
        }
        self.z.iter_mut().zip(self.rows).for_each(|(z, &k)| *z += self.decay * k);
    }
}
