//! [`Fused`]: checks of a call, one pass per document, and the memory that passes share.

use std::sync::Arc;

use crate::engine::{SavedBufferPool, SavedRows};
use crate::fused::decode::sequential;
use crate::fused::mode::Mode;
use crate::fused::plan_cache::{PlanCache, PlanOptions, Planned};
use crate::fused::scratch::Scratch;
use crate::fused::{backward, forward};
use crate::{Attention, Error, Grads, Inputs, Layer, Report, Saved, StateKind};

/// Attention in tiles, float32.
///
/// ```
/// use termwise_attention::{Attention, Grads, Inputs, Layer};
///
/// let layer = Layer::new(2, 1, 4).variant("exp over=sum rope=off")?;
/// let mut attention = layer.fused(1, 3)?;
/// let (q, k, v) = ([0.1; 24], [0.2; 12], [0.3; 12]);
/// let inputs = Inputs::new(&q, &k, &v);
/// let mut y = [0.0; 24];
/// let saved = attention.forward(&inputs, &mut y)?;
/// assert!(y.iter().all(|y| (y - 0.3).abs() < 1e-6));
///
/// let (mut dq, mut dk, mut dv) = ([0.0; 24], [0.0; 12], [0.0; 12]);
/// attention.backward(&inputs, &saved, &[1.0; 24], &mut Grads::new(&mut dq, &mut dk, &mut dv))?;
/// assert!((dv.iter().sum::<f32>() - 24.0).abs() < 1e-5);
/// # Ok::<(), termwise_attention::Error>(())
/// ```
pub struct Fused {
    pub(in crate::fused) plans: PlanCache,
    pub(in crate::fused) scratch: Scratch,
    pool: Arc<SavedBufferPool>,
}

/// Options of a fused engine beyond its layer and sizes.
#[derive(Clone, Default)]
pub struct FusedOptions {
    plan: PlanOptions,
    scratch: Scratch,
}

impl FusedOptions {
    /// Use this mode instead of [`Mode::Parallel`].
    pub fn mode(self, mode: Mode) -> FusedOptions {
        FusedOptions { plan: PlanOptions { mode, ..self.plan }, ..self }
    }

    /// Use memory for intermediate results that other engines share.
    pub fn scratch(self, scratch: &Scratch) -> FusedOptions {
        FusedOptions { scratch: scratch.clone(), ..self }
    }

    /// Prepare for [`Fused::extend`] from states of this kind. Heads with a state of constant size run in chunks, which are as long as the call
    /// unless the mode gives another length.
    pub fn continues(self, memory: StateKind) -> FusedOptions {
        FusedOptions { plan: PlanOptions { continues: Some(memory), ..self.plan }, ..self }
    }

    /// Round the inputs of the products of scores, weights and values to bfloat16, with float32 sums. Applies to layers whose heads all score every key with
    /// e^x or a polynomial of order 2 at most; others run in float32, as do chunks and [`Fused::extend`].
    pub fn bf16(self, bf16: bool) -> FusedOptions {
        FusedOptions { plan: PlanOptions { bf16, ..self.plan }, ..self }
    }
}

impl Layer {
    /// The fused engine for B rows of T positions.
    pub fn fused(&self, batch: usize, time: usize) -> Result<Fused, Error> {
        self.fused_with(batch, time, FusedOptions::default())
    }

    /// Like [`Layer::fused`], with these options.
    pub fn fused_with(&self, batch: usize, time: usize, options: FusedOptions) -> Result<Fused, Error> {
        let shape = self.shape(batch, time)?;
        let FusedOptions { plan, scratch } = options;
        Ok(Fused { plans: PlanCache::new(self, shape, plan)?, scratch, pool: Arc::default() })
    }
}

impl Fused {
    /// The mode in which the heads with a finite state run: [`Mode::Parallel`], or [`Mode::Chunk`] with the length of its chunks.
    pub fn mode_taken(&self) -> Mode {
        let plan = &self.plans.whole.plan;
        if plan.groups.is_empty() { Mode::Parallel } else { Mode::Chunk(Some(plan.chunk_len())) }
    }

    /// Whether this head runs in chunks; false for a head that does not exist.
    pub fn runs_in_chunks(&self, head: usize) -> bool {
        let plan = &self.plans.whole.plan;
        head < plan.heads.len() && plan.runs_in_chunks(head)
    }

    /// Memory for the sums of all rows.
    pub(in crate::fused) fn new_saved(&self) -> Result<Saved, Error> {
        let mut saved = self.pool.saved(Report::default(), self.pool.take());
        let plan = &self.plans.whole.plan;
        let rows = plan.head_count() * plan.shape.time;
        saved.rows.u.ensure(rows * plan.ep)?;
        saved.rows.z.ensure(rows)?;
        saved.rows.rho.ensure(rows)?;
        Ok(saved)
    }

    /// One forward pass per document.
    fn run(&mut self, inputs: &Inputs<f32>, mut saved: Option<&mut SavedRows>, y: &mut [f32]) -> Result<Report, Error> {
        let Fused { plans, scratch, .. } = self;
        let s = plans.whole.plan.shape;
        plans.whole.plan.layer.check(&s, inputs, 1)?;
        s.check_outputs("y", y.len())?;
        plans.plan_documents(inputs)?;
        let mut report = Report::default();
        for (at, shape, inputs) in inputs.each_document(&s) {
            let saved = saved.as_deref_mut().map(|saved| saved.part_mut(&at, s.heads));
            let y = &mut y[at.start * s.heads * s.e..at.end * s.heads * s.e];
            let planned = plans.get(&shape);
            planned.bind(&inputs)?;
            let Planned { plan, sequential } = planned;
            let found = scratch.with(|w| {
                w.ensure_forward(plan)?;
                let report = forward(plan, &inputs, None, w, saved, y);
                match sequential {
                    Some(state) => Ok(report.or(sequential::run(plan, &inputs, w, state, y)?)),
                    None => Ok::<_, Error>(report),
                }
            })?;
            report = report.or(found.of_document(at.start, &s));
        }
        Ok(report)
    }
}

impl Attention<f32> for Fused {
    fn infer(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Report, Error> {
        self.run(inputs, None, y)
    }

    fn forward(&mut self, inputs: &Inputs<f32>, y: &mut [f32]) -> Result<Saved, Error> {
        self.plans.whole.plan.layer.check_trainable()?;
        let mut saved = self.new_saved()?;
        saved.report = self.run(inputs, Some(&mut saved.rows), y)?;
        saved.rows.keep_partition(inputs);
        Ok(saved)
    }

    fn backward(&mut self, inputs: &Inputs<f32>, saved: &Saved, dy: &[f32], grads: &mut Grads<f32>) -> Result<(), Error> {
        let Fused { plans, scratch, pool } = self;
        let (layer, s) = (&plans.whole.plan.layer, plans.whole.plan.shape);
        layer.check_trainable()?;
        pool.check(saved)?;
        saved.rows.check_partition(inputs)?;
        layer.check(&s, inputs, 1)?;
        layer.check_grads(&s, grads)?;
        s.check_outputs("gradient of y", dy.len())?;
        plans.plan_documents(inputs)?;
        for (at, shape, inputs) in inputs.each_document(&s) {
            let dy = &dy[at.start * s.heads * s.e..at.end * s.heads * s.e];
            let saved = saved.rows.part(&at, s.heads);
            let planned = plans.get(&shape);
            planned.plan.bind(&inputs);
            scratch.with(|w| {
                w.ensure_forward(&planned.plan)?;
                w.ensure_backward(&planned.plan)?;
                backward(&planned.plan, &inputs, w, saved, dy, &mut grads.part(&at, &s));
                Ok::<_, Error>(())
            })?;
        }
        Ok(())
    }
}
