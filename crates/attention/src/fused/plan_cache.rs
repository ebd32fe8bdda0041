//! Plans of whole calls and of documents, cached across calls.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::fused::cost;
use crate::fused::mode::Mode;
use crate::fused::plan::CallPlan;
use crate::state::State;
use crate::{Error, Inputs, Layer, Shape, StateKind};

/// Number of document plans that are cached, unless one call needs more.
const DOCUMENT_PLANS: usize = 256;

/// What determines the plan of a call beyond its layer and sizes.
#[derive(Clone, Copy, Default)]
pub(in crate::fused) struct PlanOptions {
    /// The requested mode.
    pub mode: Mode,
    /// The kind of states that [`crate::Fused::extend`] continues from.
    pub continues: Option<StateKind>,
    /// Whether products may run in bfloat16.
    pub bf16: bool,
}

/// A call of one shape.
pub(in crate::fused) struct Planned {
    pub plan: CallPlan,
    /// The state of heads evaluated sequentially, for calls that start a sequence. `None` before the first call and without such heads.
    pub sequential: Option<State>,
}

impl Planned {
    fn new(layer: &Layer, shape: Shape, PlanOptions { mode, continues, bf16 }: PlanOptions) -> Result<Planned, Error> {
        let chosen = cost::plan(layer, &shape, mode)?;
        let mut plan = CallPlan::new(layer, shape, chosen.as_ref().map(|(length, chunked)| (*length, &chunked[..])))?;
        if let Some(memory) = continues {
            let states = layer.state_plan(memory);
            let chunked: Vec<bool> = states.group_of.iter().map(|&(group, _)| states.groups[group].remembered().is_some()).collect();
            let length = if plan.groups.is_empty() { shape.time } else { plan.chunk_len() };
            plan = CallPlan::new(layer, shape, chunked.contains(&true).then_some((length, &chunked[..])))?;
        }
        plan.bf16 = bf16 && continues.is_none() && plan.admits_bf16();
        Ok(Planned { plan, sequential: None })
    }

    /// Binds the learned coefficients of a call, and clears the state of heads evaluated sequentially.
    pub fn bind(&mut self, inputs: &Inputs<f32>) -> Result<(), Error> {
        self.plan.bind(inputs);
        match &mut self.sequential {
            Some(state) => state.clear(),
            None if self.plan.has_sequential_heads() => self.sequential = Some(self.plan.layer.state(self.plan.shape.batch)?),
            None => {}
        }
        Ok(())
    }
}

/// The plan of a call without documents, and plans of documents by their length.
pub(in crate::fused) struct PlanCache {
    pub whole: Planned,
    documents: HashMap<usize, Planned>,
    pub options: PlanOptions,
}

impl PlanCache {
    pub fn new(layer: &Layer, shape: Shape, options: PlanOptions) -> Result<PlanCache, Error> {
        Ok(PlanCache { whole: Planned::new(layer, shape, options)?, documents: HashMap::new(), options })
    }

    /// Plans every document of a call.
    pub fn plan_documents(&mut self, inputs: &Inputs<f32>) -> Result<(), Error> {
        let whole = &self.whole.plan;
        if self.documents.len() > DOCUMENT_PLANS {
            self.documents.clear();
        }
        for (_, shape, _) in inputs.each_document(&whole.shape).filter(|(_, shape, _)| *shape != whole.shape) {
            if let Entry::Vacant(place) = self.documents.entry(shape.time) {
                place.insert(Planned::new(&whole.layer, shape, self.options)?);
            }
        }
        Ok(())
    }

    /// The plan of a call or document of this shape.
    pub fn get(&mut self, shape: &Shape) -> &mut Planned {
        if *shape == self.whole.plan.shape { &mut self.whole } else { self.documents.get_mut(&shape.time).expect("planned before") }
    }
}
