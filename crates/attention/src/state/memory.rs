//! What a layer keeps between tokens.
//!
//! A state is a list of units for each batch row. Where the kernel is a polynomial a unit holds moments, H [N, ep] and, where
//! the denominator sums, z [N]; elsewhere a cache of keys and values. Heads of one kv head whose memory has the same content
//! share a unit: kernels, scales and coefficients act on the query's side, so heads may differ in them.

use std::sync::Arc;

use crate::extras::layer_extras;
use crate::kernels::PAD;
use crate::kernels::basis::Basis;
use crate::kernels::score_rows::Rescale;
use crate::parts::kernel::feature::Map;
use crate::state::cache::{Cache, Sums};
use crate::state::step::{Table, UnitRow};
use crate::state::step_state::Carry;
use crate::state::token::Token;
use crate::{Buffer, Error, Kernel, Shape, Variant};

/// What a state may consist of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Moments of constant size where the kernel has a finite map and no clamp, a cache elsewhere.
    Natural,
    /// A cache of keys and values everywhere.
    Cache,
}

/// The memory of one layer, for all its batch rows and heads, in float32.
///
/// Built empty; [`State::step`] takes one token in. The size of moments does not change, caches grow with the tokens.
///
/// ```
/// use termwise_attention::{Extras, Inputs, Memory, Rope, Shape, State, Variant};
///
/// let shape = Shape { batch: 1, time: 1, heads: 2, kv_heads: 1, d: 4, e: 4 };
/// let variant: Variant = "taylor=0..2".parse()?;
/// let mut state = State::new(&[variant.clone(), variant], shape, Memory::Natural)?;
/// let (q, k, v) = ([0.1; 8], [0.2; 4], [0.3; 4]);
/// let rope = Rope::new(4, 10_000.0, None)?;
/// let mut y = [0.0; 8];
/// for _ in 0..3 {
///     state.step(&Inputs { q: &q, k: &k, v: &v, extras: Extras::default(), lengths: None, rope: &rope }, &mut y)?;
/// }
/// assert!(y.iter().all(|y| (y - 0.3).abs() < 1e-6));
/// assert_eq!(state.position(0), 3);
/// # Ok::<(), termwise_attention::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct State {
    pub(crate) heads: Vec<Variant>,
    /// Kernels, with learned coefficients taken in.
    pub(crate) kernels: Vec<Kernel>,
    /// With one position.
    pub(crate) shape: Shape,
    pub(crate) memory: Memory,
    pub(crate) units: Vec<Unit>,
    /// Of each head.
    pub(crate) tables: Vec<Table>,
    /// Of each head.
    pub(crate) unit_of: Vec<Place>,
    /// [B, units]
    pub(crate) stores: Vec<Store>,
    pub(crate) carry: Carry,
    pub(crate) token: Token,
}

/// The unit of a head, and its place in [`Unit::heads`].
pub(crate) type Place = (usize, usize);

/// What one unit of every batch row is: the same for all.
#[derive(Clone, Debug)]
pub(crate) struct Unit {
    pub kv_head: usize,
    /// Query heads that read it.
    pub heads: Vec<usize>,
    pub rope: bool,
    pub conv: bool,
    /// φ
    pub map: Map,
    pub kind: Kind,
}

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Moments {
        basis: Arc<Basis>,
        /// Whether there is a z.
        sums: bool,
        /// Whether values are weighted by the input gate of the kv head.
        in_gate: bool,
        /// Whether the one head that it belongs to has a decay or a weight of its own for each key.
        own: bool,
    },
    Cache,
}

impl Unit {
    /// The basis of moments.
    pub fn basis(&self) -> Option<&Basis> {
        match &self.kind {
            Kind::Moments { basis, .. } => Some(basis),
            Kind::Cache => None,
        }
    }

    fn same_content(&self, other: &Unit) -> bool {
        let alike = |a: &Unit| (a.kv_head, a.rope, a.conv, a.map);
        alike(self) == alike(other)
            && match (&self.kind, &other.kind) {
                (Kind::Cache, Kind::Cache) => true,
                (
                    Kind::Moments { basis: a, sums: sa, in_gate: ga, own: false },
                    Kind::Moments { basis: b, sums: sb, in_gate: gb, own: false },
                ) => a.orders() == b.orders() && sa == sb && ga == gb,
                _ => false,
            }
    }
}

/// The memory of one unit of one batch row.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub memory: UnitMemory,
    /// The largest ‖k‖ of prepared keys so far.
    pub key_norm: f32,
    /// The last U [heads of the unit, ep].
    pub u: Vec<f32>,
    /// The last z and ρ of each head.
    pub rows: Vec<UnitRow>,
    /// Room for the sums of a cache.
    pub sums: Vec<Sums>,
}

#[derive(Clone, Debug)]
pub(crate) enum UnitMemory {
    Moments {
        /// [N, ep]
        h: Buffer,
        /// [N], or empty.
        z: Buffer,
    },
    Cache(Cache),
}

impl State {
    /// The empty memory of a layer whose heads have these variants, one each. The shape's time is not read.
    pub fn new(heads: &[Variant], shape: Shape, memory: Memory) -> Result<State, Error> {
        let shape = Shape { time: 1, ..shape };
        layer_extras(heads, &shape)?;
        let (units, unit_of) = plan(heads, &shape, memory)?;
        let ep = shape.e.next_multiple_of(PAD);
        let store = |unit: &Unit| Store {
            memory: match &unit.kind {
                Kind::Moments { basis, sums, .. } => {
                    UnitMemory::Moments { h: Buffer::zeros(basis.rows() * ep), z: Buffer::zeros(if *sums { basis.rows() } else { 0 }) }
                }
                Kind::Cache => UnitMemory::Cache(Cache::new(shape.d, ep, unit.heads.len())),
            },
            key_norm: 0.0,
            u: vec![0.0; unit.heads.len() * ep],
            rows: vec![UnitRow::default(); unit.heads.len()],
            sums: vec![Sums::new(Rescale::None); unit.heads.len()],
        };
        let stores = (0..shape.batch).flat_map(|_| units.iter().map(store)).collect();
        Ok(State {
            kernels: heads.iter().map(|variant| variant.kernel.clone()).collect(),
            heads: heads.to_vec(),
            carry: Carry::new(heads, &shape),
            token: Token::new(heads, &shape),
            shape,
            memory,
            tables: tables(heads, &units, &unit_of, shape.d),
            units,
            unit_of,
            stores,
        })
    }

    /// The variants of its heads.
    pub fn heads(&self) -> &[Variant] {
        &self.heads
    }

    /// Its sizes, with a time of one.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// What it was asked to consist of.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Positions that a batch row has seen.
    pub fn position(&self, row: usize) -> usize {
        self.carry.positions[row]
    }

    /// Bytes of all memories and of what else is carried, from the buffers that hold them.
    pub fn bytes(&self) -> usize {
        let store = |store: &Store| match &store.memory {
            UnitMemory::Moments { h, z } => h.bytes() + z.bytes(),
            UnitMemory::Cache(cache) => cache.bytes(),
        };
        self.stores.iter().map(store).sum::<usize>() + self.carry.bytes()
    }

    /// Whether no unit grows with the tokens.
    pub fn is_constant(&self) -> bool {
        self.units.iter().all(|unit| unit.basis().is_some())
    }

    /// A number that no score |x| of this head so far exceeds: the largest itself where keys are kept, elsewhere
    /// |scale|·‖q‖·max ‖k‖, which is no smaller by the inequality of Cauchy and Schwarz.
    pub fn largest_score(&self, row: usize, head: usize) -> f64 {
        self.carry.scores[row * self.shape.heads + head] as f64
    }

    /// Forgets everything: as newly built. Memory stays allocated.
    pub fn clear(&mut self) {
        for store in &mut self.stores {
            store.key_norm = 0.0;
            match &mut store.memory {
                UnitMemory::Moments { h, z } => {
                    h.fill(0.0);
                    z.fill(0.0);
                }
                UnitMemory::Cache(cache) => cache.clear(),
            }
        }
        self.carry = Carry::new(&self.heads, &self.shape);
    }
}

/// The units of a layer, and for each head its unit and its place there.
fn plan(heads: &[Variant], shape: &Shape, memory: Memory) -> Result<(Vec<Unit>, Vec<Place>), Error> {
    let mut units: Vec<Unit> = Vec::new();
    let mut unit_of = Vec::with_capacity(heads.len());
    for (h, variant) in heads.iter().enumerate() {
        let polynomial = if memory == Memory::Natural && variant.clamp.is_none() { variant.kernel.polynomial() } else { None };
        let kind = match polynomial {
            None => Kind::Cache,
            Some(polynomial) => {
                let orders: Vec<usize> = polynomial.into_iter().map(|(n, _)| n).collect();
                let known = units.iter().find_map(|unit| match &unit.kind {
                    Kind::Moments { basis, .. } if basis.orders() == orders => Some(basis.clone()),
                    _ => None,
                });
                Kind::Moments {
                    basis: match known {
                        Some(basis) => basis,
                        None => Arc::new(Basis::new(shape.d, &orders)?),
                    },
                    sums: variant.denominator.sums(),
                    in_gate: variant.in_gate.is_some(),
                    own: variant.decay.is_some() || variant.denominator.key_side(),
                }
            }
        };
        let unit = Unit {
            kv_head: h / shape.group(),
            heads: vec![h],
            rope: variant.rope,
            conv: variant.conv.is_some(),
            map: variant.kernel.map(),
            kind,
        };
        match units.iter().position(|other| other.same_content(&unit)) {
            Some(index) => {
                unit_of.push((index, units[index].heads.len()));
                units[index].heads.push(h);
            }
            None => {
                unit_of.push((units.len(), 0));
                units.push(unit);
            }
        }
    }
    Ok((units, unit_of))
}

/// scale^n/α!, times a_n where that is not learned, for each head with moments; heads with the same numbers share them.
fn tables(heads: &[Variant], units: &[Unit], unit_of: &[Place], d: usize) -> Vec<Table> {
    let mut known: Vec<(&Variant, Table)> = Vec::new();
    heads
        .iter()
        .zip(unit_of)
        .map(|(variant, &(unit, _))| {
            let Some(basis) = units[unit].basis() else { return Table::default() };
            if let Some((_, table)) = known.iter().find(|(other, _)| other.kernel == variant.kernel && other.scale == variant.scale) {
                return table.clone();
            }
            let (scale, learned) = (variant.scale_for(d), variant.learned() > 0);
            let mut table = basis.wide_inverse_factorials();
            for (i, (n, a)) in variant.kernel.polynomial().into_iter().flatten().enumerate() {
                let factor = scale.powi(n as i32) * if learned { 1.0 } else { a };
                table[basis.span(i)].iter_mut().for_each(|c| *c *= factor);
            }
            let table = Table::new(table.into_iter().map(|c| c as f32).collect());
            known.push((variant, table.clone()));
            table
        })
        .collect()
}
