//! The native engine as a [`Learner`].

use std::fmt;
use std::path::Path;

use termwise_model::weights::{self, Checkpoint as Weights, NamedTensor, WriteOptions};
use termwise_model::{Model, Params, Session};

use crate::checkpoint::OPTIMIZER;
use crate::collective::Collective;
use crate::error::{Error, Result};
use crate::eval::Sums;
use crate::learner::{Learner, operations};
use crate::memory;
use crate::nonfinite::{self, Diagnosis};
use crate::settings::Settings;
use crate::step::{Computed, Gradients};
use crate::{AdamW, AdamWConfig, gradient_norm};
use termwise_data::Rows;

/// A Llama model, AdamW moments, and buffers for batches.
pub struct Native {
    model: Model,
    optimizer: AdamW,
    gradients: Option<Gradients>,
    /// Sequence length in training, and buffers for longer sequences in evaluation.
    longer: Option<(usize, Session)>,
}

/// Copies of all parameters: weights, gradient, two moments.
const PARAMETER_COPIES: u128 = 4;

impl Native {
    /// With new weights, or with those of the model to start from.
    pub fn fresh(settings: &Settings, vocabulary: usize) -> Result<Native> {
        let config = settings.config(vocabulary)?;
        memory::check(&config, settings.batch, settings.length, PARAMETER_COPIES, config.num_hidden_layers)?;
        let model = match settings.from.is_empty() {
            true => Model::fresh(config, settings.seed)?,
            false => Model::with_weights(config, &Weights::open(crate::run::locate(&settings.from))?)?,
        };
        let optimizer = AdamW::new(&model.params, settings.adamw())?;
        Ok(Native { model, optimizer, gradients: None, longer: None })
    }

    /// Reads the files of a checkpoint.
    pub fn read(folder: &Path, config: AdamWConfig, updates: u64) -> Result<Native> {
        let model = Model::read(folder)?;
        let optimizer = read_moments(&folder.join(OPTIMIZER), &model.params, config, updates)?;
        Ok(Native { model, optimizer, gradients: None, longer: None })
    }

    /// The current model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model and its moments, for another engine.
    pub fn into_parts(self) -> (Model, AdamW) {
        (self.model, self.optimizer)
    }

    fn room(&mut self) -> Result<(&Model, &mut Gradients)> {
        let gradients = self.gradients.as_mut().ok_or(Error::Internal("a learner was used before it was prepared"))?;
        Ok((&self.model, gradients))
    }
}

impl fmt::Debug for Native {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Native").field("updates", &self.optimizer.steps).finish_non_exhaustive()
    }
}

impl Learner for Native {
    fn prepare(&mut self, settings: &Settings, collective: &dyn Collective) -> Result<()> {
        let config = &self.model.config;
        // Weights and moments are already allocated.
        memory::check(config, settings.batch, settings.length, 1, config.num_hidden_layers)?;
        self.optimizer.config = settings.adamw();
        let ranks = (collective.rank(), collective.size());
        self.gradients = Some(Gradients::new(&self.model, settings.cut(), settings.options()?, ranks)?);
        if let Some(length) = settings.eval_length {
            memory::check(config, settings.batch, length, 0, 1)?;
            let options = settings.options()?.forward_only(true);
            self.longer = Some((settings.length, self.model.session(settings.batch, length, options)?));
        }
        Ok(())
    }

    fn gradient(&mut self, batches: &[Rows]) -> Result<()> {
        let (model, gradients) = self.room()?;
        gradients.compute(&model.params, batches)
    }

    fn reduce(&mut self, collective: &dyn Collective) -> Result<Computed> {
        self.room()?.1.reduce(collective)
    }

    fn norm(&self) -> Result<f64> {
        Ok(self.gradients.as_ref().map_or(f64::NAN, |gradients| gradient_norm(gradients.gradient())))
    }

    fn update(&mut self, learning_rate: f64, scale: f64) -> Result<()> {
        if let Some(gradients) = &self.gradients {
            self.optimizer.step(&mut self.model.params, gradients.gradient(), learning_rate, scale);
        }
        Ok(())
    }

    fn updates(&self) -> u64 {
        self.optimizer.steps
    }

    fn loss(&mut self, rows: &Rows) -> Result<Sums> {
        if let Some((trained, session)) = &mut self.longer {
            let mut sums = Sums::beyond(*trained);
            sums.add(session, &self.model.params, rows, 0..rows.rows)?;
            return Ok(sums);
        }
        let (model, gradients) = self.room()?;
        gradients.loss(&model.params, rows)
    }

    fn operations(&self, settings: &Settings) -> f64 {
        operations(self.model.params.layout(), &self.model.config, settings)
    }

    fn diagnose(&self, computed: &Computed, batches: &[Rows], step: u64) -> Diagnosis {
        nonfinite::diagnose(&self.model, self.gradients.as_ref(), computed, batches, step)
    }

    fn write_model(&self, folder: &Path) -> Result<Vec<&'static str>> {
        self.model.write(folder, &WriteOptions::default())?;
        Ok([self.model.config.files(), &[weights::SINGLE_FILE]].concat())
    }

    fn write_moments(&self, folder: &Path) -> Result<()> {
        let moments = [("first", &self.optimizer.first), ("second", &self.optimizer.second)];
        let named: Vec<(String, &[usize], &[f32])> = moments
            .iter()
            .flat_map(|(kind, params)| params.iter().map(move |(e, data)| (format!("{kind}.{}", e.spec.name), &e.spec.shape[..], data)))
            .collect();
        let tensors = named.iter().map(|(name, shape, data)| NamedTensor { name, shape, data });
        Ok(weights::write_file(folder.join(OPTIMIZER), tensors, &WriteOptions::default())?)
    }
}

fn read_moments(path: &Path, params: &Params, config: AdamWConfig, updates: u64) -> Result<AdamW> {
    let file = Weights::open(path)?;
    let mut optimizer = AdamW::new(params, config)?;
    optimizer.steps = updates;
    let layout = params.layout().clone();
    for (kind, moments) in [("first", &mut optimizer.first), ("second", &mut optimizer.second)] {
        for entry in layout.entries() {
            let name = format!("{kind}.{}", entry.spec.name);
            file.read_into(&name, &entry.spec.shape, &mut moments.values_mut()[entry.range()])?;
        }
    }
    Ok(optimizer)
}
