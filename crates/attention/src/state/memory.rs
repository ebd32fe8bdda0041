//! What a layer keeps between tokens.
//!
//! A state has a memory for each state group of each batch row. Where the kernel is a polynomial it holds moments, H [N, ep] and, where
//! the denominator sums, z [N]; elsewhere a cache of keys and values.

use std::sync::Arc;

use crate::kernels::PAD;
use crate::kernels::basis::Basis;
use crate::kernels::score_rows::Rescale;
use crate::layer::{StateGroup, StatePlan};
use crate::state::cache::{Cache, Sums};
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
}

/// What a state group gives for one of its heads besides U.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadSums {
    pub z: f32,
    pub rho: f32,
    /// Bound of |x| at this token.
    pub largest: f32,
}

/// scale^n/α! of each row of a head's basis, times a_n where that is not learned; empty for caches.
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
        let basis = |group: &StateGroup| group.moments.as_ref().map(|moments| self.basis(&moments.orders)).transpose();
        let bases: Vec<Option<Arc<Basis>>> = plan.groups.iter().map(basis).collect::<Result<_, _>>()?;
        let ep = shape.e.next_multiple_of(PAD);
        let store = |(group, basis): (&StateGroup, &Option<Arc<Basis>>)| -> Result<Store, Error> {
            let memory = match (basis, &group.moments) {
                (Some(basis), Some(moments)) => {
                    let sums = if moments.sums { basis.rows() } else { 0 };
                    GroupMemory::Moments { h: Buffer::zeros(basis.rows() * ep)?, z: Buffer::zeros(sums)? }
                }
                _ => GroupMemory::Cache(Cache::new(shape.d, ep, group.heads.len(), group.distance)),
            };
            let heads = group.heads.len();
            let (rows, sums) = (vec![HeadSums::default(); heads], vec![Sums::new(Rescale::None, None); heads]);
            Ok(Store { memory, key_norm: 0.0, u: vec![0.0; heads * ep], rows, sums })
        };
        // What every row has takes the most: where it cannot be had, neither can the rows themselves.
        let (steps, token) = (StepState::new(self, &shape)?, Token::new(self, &shape)?);
        let stores = (0..batch).flat_map(|_| plan.groups.iter().zip(&bases).map(store)).collect::<Result<_, _>>()?;
        Ok(State {
            kernels: self.heads().iter().map(|variant| variant.kernel.clone()).collect(),
            layer: self.clone(),
            steps,
            token,
            shape,
            memory,
            tables: tables(self, plan, &bases, |variant| Some(variant.scale_for(shape.d))),
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
        let store = |store: &Store| match &store.memory {
            GroupMemory::Moments { h, z } => h.bytes() + z.bytes(),
            GroupMemory::Cache(cache) => cache.bytes(),
        };
        self.stores.iter().map(store).sum::<usize>() + self.steps.bytes()
    }

    /// Whether its size does not grow with the tokens.
    pub fn is_constant(&self) -> bool {
        self.bases.iter().all(Option::is_some)
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
            match &mut store.memory {
                GroupMemory::Moments { h, z } => {
                    h.fill(0.0);
                    z.fill(0.0);
                }
                GroupMemory::Cache(cache) => cache.clear(),
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
            GroupMemory::Moments { .. } => None,
        }
    }
}

/// scale^n/α!, times a_n where that is not learned, for each head with moments and a scale; heads with the same numbers share them.
fn tables(layer: &Layer, plan: &StatePlan, bases: &[Option<Arc<Basis>>], scale: impl Fn(&Variant) -> Option<f64>) -> Vec<Table> {
    let mut known: Vec<(&Variant, f64, Table)> = Vec::new();
    let mut tables = Vec::with_capacity(plan.group_of.len());
    for (variant, place) in layer.heads().iter().zip(&plan.group_of) {
        let (Some(basis), Some(scale)) = (&bases[place.0], scale(variant)) else {
            tables.push(Table::default());
            continue;
        };
        if let Some((_, _, table)) = known.iter().find(|(other, known, _)| other.kernel == variant.kernel && *known == scale) {
            tables.push(table.clone());
            continue;
        }
        let mut table = basis.wide_inverse_factorials();
        for (i, (n, a)) in variant.kernel.polynomial().into_iter().flatten().enumerate() {
            let factor = scale.powi(n as i32) * if variant.learned() > 0 { 1.0 } else { a };
            table[basis.span(i)].iter_mut().for_each(|c| *c *= factor);
        }
        let table = Table::new(table.into_iter().map(|c| c as f32).collect());
        known.push((variant, scale, table.clone()));
        tables.push(table);
    }
    tables
}
