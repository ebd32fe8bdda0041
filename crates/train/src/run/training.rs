//! The loop.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use termwise_llama::{Model, Options, Session};

use super::{Begin, Outcome, RunOptions};
use crate::checkpoint::{Best, Shelf, State};
use crate::error::{Error, Result};
use crate::eval::{Evaluation, Sums};
use crate::feed::{Feed, Parts};
use crate::memory;
use crate::metrics::{Line, Metrics, Train, now};
use crate::nonfinite;
use crate::progress::Progress;
use crate::schedule::Schedule;
use crate::settings::Settings;
use crate::step::{Computed, Gradients};
use crate::{AdamW, clip};
use termwise_data::{Rows, Source};

pub(super) struct Training<'a> {
    settings: &'a Settings,
    source: &'a dyn Source,
    options: &'a RunOptions,
    schedule: Schedule,
    clip: Option<f64>,
    model: Model,
    optimizer: AdamW,
    gradients: Gradients,
    /// For rows of evaluations that are longer than those of training.
    longer: Option<Session>,
    state: State,
    shelf: Shelf,
    checkpoint: Option<PathBuf>,
    /// The step of that checkpoint.
    saved: Option<u64>,
    metrics: Metrics,
    progress: Progress,
    last: Last,
}

/// What is shown and reported, and never goes into a checkpoint.
#[derive(Default)]
struct Last {
    loss: Option<f64>,
    held_out: Option<Evaluation>,
    denominator_told: bool,
    /// Time spent in steps since the last line, and tokens in it.
    window: (Duration, u64),
    /// The same since the session began.
    session: (Duration, u64),
}

impl<'a> Training<'a> {
    pub(super) fn new(
        settings: &'a Settings,
        source: &'a dyn Source,
        options: &'a RunOptions,
        shelf: Shelf,
        begin: Begin,
        warnings: Vec<String>,
    ) -> Result<Training<'a>> {
        let Begin { model, optimizer, state, checkpoint } = begin;
        let config = &model.config;
        // Weights and moments are there already.
        memory::check(config, settings.batch, settings.length, 1, config.num_hidden_layers)?;
        let gradients = Gradients::new(&model, settings.batch, settings.length, settings.options()?)?;
        let longer = settings.eval_length.map(|length| -> Result<Session> {
            memory::check(config, settings.batch, length, 0, 1)?;
            Ok(model.session(settings.batch, length, Options { forward_only: true, ..settings.options()? })?)
        });
        let longer = longer.transpose()?;
        let (metrics, unreadable) = Metrics::open(&options.folder, state.step)?;
        let share = options.peak.map(|peak| (operations(&model, settings), peak));
        let mut progress = Progress::new(options.display.clone(), settings.steps, state.step, &options.folder, share);
        for warning in warnings {
            progress.warn(state.step, &warning);
        }
        // The last line of a killed run is expected to be incomplete.
        if unreadable > 1 {
            progress.warn(state.step, &format!("{unreadable} lines of metrics.jsonl were not readable and are gone"));
        }
        if settings.steps > settings.horizon && state.step > 0 {
            let text = format!("the learning rate has fallen at step {} and stays there until step {}", settings.horizon, settings.steps);
            progress.warn(state.step, &text);
        }
        if let Some(path) = &checkpoint {
            progress.say(&format!("resuming at step {} from {}", state.step, path.display()));
        }
        Ok(Training {
            schedule: settings.schedule(),
            clip: settings.clip_limit()?,
            settings,
            source,
            options,
            model,
            optimizer,
            gradients,
            longer,
            saved: checkpoint.is_some().then_some(state.step),
            state,
            shelf,
            checkpoint,
            metrics,
            progress,
            last: Last::default(),
        })
    }

    /// Steps done in all.
    pub(super) fn done(&self) -> u64 {
        self.state.step
    }

    pub(super) fn run(&mut self) -> Result<Outcome> {
        let &Settings { seed, batch, length, accumulate, steps, .. } = self.settings;
        let (source, first) = (self.source, self.state.data_index);
        let wanted = steps.saturating_sub(self.state.step);
        std::thread::scope(|scope| {
            let mut feed = Feed::start(scope, move |step, parts: &mut Parts| {
                if step >= wanted {
                    return Ok(false);
                }
                parts.resize_with(accumulate, Rows::default);
                let index = first + step * accumulate as u64;
                for (rows, index) in parts.iter_mut().zip(index..) {
                    source.train(seed, index, batch, length, rows)?;
                }
                Ok(true)
            });
            while self.state.step < steps {
                let started = Instant::now();
                let parts = feed.next()?.ok_or(Error::Internal("the data ended before the run"))?;
                self.step(&parts, started)?;
                feed.reuse(parts);
                if self.options.stop.load(Ordering::Relaxed) && self.state.step < steps {
                    self.save()?;
                    break;
                }
            }
            Ok::<(), Error>(())
        })?;
        self.finish()
    }

    /// One step: gradient, update, and what is due after it.
    fn step(&mut self, parts: &Parts, started: Instant) -> Result<()> {
        let computed = self.gradients.compute(&self.model.params, parts)?;
        let lr = self.schedule.rate(self.state.step);
        if computed.is_finite() {
            let scale = self.clip.map_or(1.0, |limit| clip(computed.norm, limit));
            self.optimizer.step(&mut self.model.params, &self.gradients.grads, lr, scale);
        } else {
            self.refuse(&computed, parts)?;
        }
        self.count(&computed);
        let spent = started.elapsed();
        for (time, tokens) in [&mut self.last.window, &mut self.last.session] {
            *time += spent;
            *tokens += computed.tokens;
        }
        let (step, last) = (self.state.step, self.state.step == self.settings.steps);
        self.progress.step(step);
        let due = |every: u64| every > 0 && (step.is_multiple_of(every) || last);
        if due(self.settings.log_every) && self.state.window_steps > 0 {
            self.log(lr, computed.norm)?;
        }
        if due(self.settings.eval_every) {
            self.evaluate()?;
        }
        if last || due(self.settings.checkpoint_every) {
            self.save()?;
        }
        Ok(())
    }

    /// Stops, or counts a skipped update where the settings allow it.
    fn refuse(&mut self, computed: &Computed, parts: &Parts) -> Result<()> {
        let step = self.state.step + 1;
        let diagnosis = nonfinite::diagnose(&self.model, &self.gradients, computed, parts, step);
        if self.state.skipped < self.settings.skip_nonfinite {
            self.progress.warn(step, &format!("{diagnosis}; the update is skipped"));
            return Ok(());
        }
        let folder = nonfinite::save(&self.options.folder, &self.model, parts, self.settings, &diagnosis);
        let folder = match folder {
            Ok(folder) => Some(folder),
            Err(error) => {
                self.progress.warn(step, &format!("the step could not be saved: {error}"));
                None
            }
        };
        self.progress.warn(step, &diagnosis.to_string());
        Err(Error::NonFinite { diagnosis: Box::new(diagnosis), folder })
    }

    /// Goes on to the next step.
    fn count(&mut self, computed: &Computed) {
        let state = &mut self.state;
        state.step += 1;
        state.updates = self.optimizer.steps;
        state.data_index += self.settings.accumulate as u64;
        state.tokens += computed.tokens;
        state.held_out = None;
        if !computed.is_finite() {
            state.skipped += 1;
            return;
        }
        state.window_loss += computed.loss;
        state.window_steps += 1;
        let before = state.spikes.mean();
        if state.spikes.is_spike(computed.loss) {
            state.window_spike = true;
            let text = format!("the loss is {:.4}, a spike: its running mean is {before:.4}", computed.loss);
            self.progress.warn(self.state.step, &text);
        }
        if let (Some(nonpositive), false) = (computed.nonpositive, self.last.denominator_told) {
            self.last.denominator_told = true;
            let text = format!("{nonpositive}; the loss is finite, so training goes on; told once a session");
            self.progress.warn(self.state.step, &text);
        }
    }

    fn log(&mut self, lr: f64, grad_norm: f64) -> Result<()> {
        let state = &mut self.state;
        let (time, tokens) = std::mem::take(&mut self.last.window);
        let train = Train {
            step: state.step,
            time: now(),
            loss: state.window_loss / state.window_steps as f64,
            lr,
            grad_norm: Some(grad_norm).filter(|norm| norm.is_finite()),
            tokens: state.tokens,
            tokens_per_second: tokens as f64 / time.as_secs_f64().max(1e-9),
            spike: std::mem::take(&mut state.window_spike),
            skipped: state.skipped,
        };
        let step_seconds = time.as_secs_f64() / state.window_steps as f64;
        (state.window_loss, state.window_steps) = (0.0, 0);
        self.last.loss = Some(train.loss);
        self.progress.train(&train, step_seconds);
        self.metrics.add(&Line::Train(train))
    }

    fn evaluate(&mut self) -> Result<()> {
        let &Settings { batch, length, eval_length, eval_batches, .. } = self.settings;
        let (source, params) = (self.source, &self.model.params);
        let (session, length, start) = match (&mut self.longer, eval_length) {
            (Some(session), Some(longer)) => (session, longer, Sums::beyond(length)),
            _ => (&mut self.gradients.session, length, Sums::default()),
        };
        let sums = std::thread::scope(|scope| {
            let mut feed = Feed::start(scope, move |index, rows: &mut Rows| {
                Ok((eval_batches == 0 || index < eval_batches) && source.held_out(index, batch, length, rows)?)
            });
            let mut sums = start;
            while let Some(rows) = feed.next()? {
                sums.add(session, params, &rows)?;
                feed.reuse(rows);
            }
            Ok::<Sums, Error>(sums)
        })?;
        let evaluation = sums.finish(source.best_loss());
        let step = self.state.step;
        if evaluation.tokens == 0 {
            self.progress.warn(step, "there is no held-out data to evaluate on");
            return Ok(());
        }
        if !evaluation.loss.is_finite() || !evaluation.perplexity.is_finite() {
            self.progress.warn(step, &format!("the held-out loss is {}", evaluation.loss));
            return Ok(());
        }
        self.progress.held_out(step, &evaluation);
        self.state.held_out = Some(evaluation.loss);
        if self.state.best.is_none_or(|best| evaluation.loss < best.loss) {
            self.state.best = Some(Best { step, loss: evaluation.loss });
        }
        self.last.held_out = Some(evaluation);
        self.metrics.add(&Line::HeldOut { step, time: now(), evaluation })
    }

    /// Writes a checkpoint, unless this step has one: a stop may come right after one that was due.
    fn save(&mut self) -> Result<()> {
        if self.saved == Some(self.state.step) {
            return Ok(());
        }
        // Metrics first: what a checkpoint has passed must be in them.
        self.metrics.sync()?;
        let path = self.shelf.save(&self.model, &self.optimizer, &self.state, self.settings, &self.options.files)?;
        self.shelf.prune(self.state.step, self.settings.keep)?;
        (self.checkpoint, self.saved) = (Some(path), Some(self.state.step));
        Ok(())
    }

    fn finish(&mut self) -> Result<Outcome> {
        if self.checkpoint.is_none() {
            self.save()?;
        }
        self.metrics.finish(self.state.step)?;
        let (time, tokens) = self.last.session;
        Ok(Outcome {
            folder: self.options.folder.clone(),
            step: self.state.step,
            finished: self.state.step >= self.settings.steps,
            checkpoint: self.checkpoint.clone().unwrap_or_default(),
            loss: self.last.loss,
            held_out: self.last.held_out,
            best: self.state.best,
            skipped: self.state.skipped,
            warnings: self.progress.count,
            tokens_per_second: if tokens == 0 { 0.0 } else { tokens as f64 / time.as_secs_f64().max(1e-9) },
        })
    }
}

/// Operations of a step: 6·tokens·numbers in matrices besides the embedding, and attention.
fn operations(model: &Model, settings: &Settings) -> f64 {
    let entries = model.params.layout().entries();
    let matrices = entries.iter().filter(|entry| entry.is_matrix() && !entry.spec.name.starts_with("model.embed_tokens"));
    let numbers: usize = matrices.map(|entry| entry.spec.len()).sum();
    let rows = (settings.batch * settings.accumulate) as f64;
    let (time, config) = (settings.length as f64, &model.config);
    let attention = (config.num_hidden_layers * config.num_attention_heads * config.head_dim) as f64 * 2.0 * time * (time + 1.0);
    rows * (6.0 * time * numbers as f64 + 3.5 * attention)
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::progress::Display;
    use termwise_data::Prepare;

    #[test]
    fn a_step_is_not_saved_twice() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = "layers = 1\nhidden = 16\nheads = 1\nmlp = 16\nbatch = 1\nlength = 128\nsteps = 2";
        let settings = Settings::from_toml(text, "test").expect("settings");
        let source = settings.open_source(folder.path(), &Prepare::default()).expect("the language");
        let options = RunOptions { display: Display::Silent, ..RunOptions::new(folder.path()) };
        let begin = super::super::fresh(&settings, source.as_ref()).expect("a model");
        let shelf = Shelf::new(folder.path().join("checkpoints"));
        let mut training = Training::new(&settings, source.as_ref(), &options, shelf.clone(), begin, Vec::new()).expect("a training");
        let file = |step| std::fs::metadata(shelf.place(step).join("manifest.json")).map(|file| (file.ino(), file.mtime_nsec()));
        training.save().expect("a checkpoint");
        let first = file(0).expect("a manifest");
        training.save().expect("the same");
        assert_eq!(file(0).expect("a manifest"), first, "it was written again");
        training.state.step = 1;
        training.save().expect("the next");
        assert!(file(1).is_ok());
    }
}
