//! The training loop.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::replace::Replacement;
use super::{Begin, Outcome, RunOptions};
use crate::checkpoint::{Best, Checkpoints, State};
use crate::clip;
use crate::collective::{Alone, Collective};
use crate::error::{Error, Result};
use crate::eval::{self, Evaluation};
use crate::learner::Learner;
use crate::metrics::{Line, Metrics, Train, now};
use crate::nonfinite;
use crate::prefetch::{Parts, Prefetch};
use crate::progress::Progress;
use crate::schedule::Schedule;
use crate::settings::Settings;
use crate::step::Computed;
use termwise_data::{Rows, Source};

pub(super) struct Training<'a> {
    settings: &'a Settings,
    source: &'a dyn Source,
    options: &'a RunOptions,
    collective: &'a dyn Collective,
    schedule: Schedule,
    clip: Option<f64>,
    learner: Box<dyn Learner>,
    state: State,
    /// Only on rank 0.
    writer: Option<Writer>,
    checkpoint: Option<PathBuf>,
    /// The step of that checkpoint.
    saved: Option<u64>,
    progress: Progress,
    last: Last,
}

/// Output files of a run.
pub(super) struct Writer {
    checkpoints: Checkpoints,
    metrics: Metrics,
    /// Number of unreadable lines of metrics.
    unreadable: usize,
    /// The replaced run, kept until the first checkpoint.
    replacement: Option<Replacement>,
}

impl Writer {
    /// Truncates the metrics to this step.
    pub(super) fn open(folder: &Path, checkpoints: Checkpoints, step: u64, replacement: Option<Replacement>) -> Result<Writer> {
        let (metrics, unreadable) = Metrics::open(folder, step)?;
        Ok(Writer { checkpoints, metrics, unreadable, replacement })
    }
}

/// State for display and reporting, not stored in checkpoints.
#[derive(Default)]
struct Last {
    /// Loss of step 1, if this session computed it.
    first: Option<f64>,
    loss: Option<f64>,
    held_out: Option<Evaluation>,
    /// Whether the loss of the last evaluation was NaN or infinite.
    diverged: bool,
    denominator_reported: bool,
    /// Time spent in steps since the last line of metrics, and tokens in it.
    window: (Duration, u64),
    /// The same since the start of the session.
    session: (Duration, u64),
}

impl<'a> Training<'a> {
    pub(super) fn new(
        settings: &'a Settings,
        source: &'a dyn Source,
        options: &'a RunOptions,
        writer: Option<Writer>,
        begin: Begin,
        warnings: Vec<String>,
    ) -> Result<Training<'a>> {
        let Begin { learner, state, checkpoint } = begin;
        let mut learner: Box<dyn Learner> = match &options.engine {
            None => learner,
            Some(engine) => {
                let (model, optimizer) = learner.into_parts();
                engine.adopt(model, optimizer, settings)?
            }
        };
        let collective = &*options.collective;
        agree_on_run(collective, settings, source, options, &state)?;
        learner.prepare(settings, collective)?;
        let share = options.peak.map(|peak| (learner.operations(settings), peak * collective.size() as f64));
        let folder = writer.as_ref().map(|_| options.folder.as_path());
        let mut progress = Progress::new(options.display.clone(), settings.steps, state.step, folder, share);
        for warning in warnings {
            progress.warn(state.step, &warning);
        }
        // The last line of a killed run is normally incomplete.
        if let Some(unreadable) = writer.as_ref().map(|writer| writer.unreadable).filter(|&lines| lines > 1) {
            progress.warn(state.step, &format!("{unreadable} lines of metrics.jsonl were unreadable and were removed"));
        }
        if settings.steps > settings.horizon && state.step > 0 {
            let text = format!(
                "the learning rate decay ends at step {}; it is constant until the last step, {}",
                settings.horizon, settings.steps
            );
            progress.warn(state.step, &text);
        }
        if settings.warmup > settings.steps && state.step == 0 {
            let (warmup, steps) = (settings.warmup, settings.steps);
            let text = format!(
                "the warmup of {warmup} steps is longer than the run of {steps}: the learning rate never reaches `lr`; reduce --warmup or train longer"
            );
            progress.warn(state.step, &text);
        }
        if let Some(path) = &checkpoint {
            progress.message(&format!("resuming at step {} from {}", state.step, path.display()));
        }
        if collective.size() > 1 {
            progress.message(&shared(collective.size(), settings.micro_batches));
        }
        Ok(Training {
            schedule: settings.schedule(),
            clip: settings.clip_limit()?,
            settings,
            source,
            options,
            collective,
            learner,
            saved: checkpoint.is_some().then_some(state.step),
            state,
            writer,
            checkpoint,
            progress,
            last: Last::default(),
        })
    }

    /// Total steps done.
    pub(super) fn done(&self) -> u64 {
        self.state.step
    }

    /// Restores the replaced run if this one has failed before its first checkpoint. The diagnosis of a NaN or infinity is kept next to it.
    pub(super) fn failed(&mut self, error: Error) -> Error {
        let Some(replacement) = self.writer.as_mut().and_then(|writer| writer.replacement.as_mut()) else { return error };
        let keep = matches!(error, Error::NonFinite { file: Some(_), .. });
        let kept = replacement.revert(keep).unwrap_or_else(|problem| {
            let text = format!("the replaced run could not be restored: {problem}; the next `termwise train` in this directory retries");
            self.progress.message(&format!("warning: {text}"));
            None
        });
        match (error, kept) {
            (Error::NonFinite { diagnosis, file: Some(saved) }, Some(kept)) => {
                // nonfinite-step-N/diagnosis.json
                let step = saved.parent().and_then(Path::file_name);
                let file = step.zip(saved.file_name()).map(|(step, name)| kept.join(step).join(name));
                Error::NonFinite { diagnosis, file }
            }
            (error, _) => error,
        }
    }

    pub(super) fn run(&mut self) -> Result<Outcome> {
        let &Settings { seed, batch, length, accumulate, steps, .. } = self.settings;
        let (source, first) = (self.source, self.state.data_index);
        let wanted = steps.saturating_sub(self.state.step);
        std::thread::scope(|scope| {
            let mut prefetch = Prefetch::start(scope, move |step, parts: &mut Parts| {
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
                let parts = prefetch.next()?.ok_or(Error::Internal("the data ended before the run"))?;
                self.step(&parts, started)?;
                prefetch.reuse(parts);
                let stop = self.collective.agree(self.options.stop.load(Ordering::Relaxed))?;
                if stop && self.state.step < steps {
                    self.save()?;
                    break;
                }
            }
            Ok::<(), Error>(())
        })?;
        self.finish()
    }

    /// One step: gradient, update, and due evaluations, logs and checkpoints.
    fn step(&mut self, parts: &Parts, started: Instant) -> Result<()> {
        self.learner.gradient(parts)?;
        let mut computed = self.learner.reduce(self.collective)?;
        computed.norm = self.learner.norm()?;
        let lr = self.schedule.rate(self.state.step);
        if computed.is_finite() {
            self.learner.update(lr, self.clip.map_or(1.0, |limit| clip(computed.norm, limit)))?;
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

    /// Stops the run, or counts a skipped update if the settings allow it.
    fn refuse(&mut self, computed: &Computed, parts: &Parts) -> Result<()> {
        let step = self.state.step + 1;
        let skipped = self.state.skipped < self.settings.skip_nonfinite;
        if self.writer.is_none() {
            // Rank 0 writes the diagnosis.
            return if skipped { Ok(()) } else { Err(Error::FirstRank) };
        }
        let diagnosis = self.learner.diagnose(computed, parts, step);
        if skipped {
            self.progress.warn(step, &format!("{diagnosis}; the update is skipped"));
            return Ok(());
        }
        let file = match nonfinite::save(&self.options.folder, &diagnosis) {
            Ok(file) => Some(file),
            Err(error) => {
                self.progress.warn(step, &format!("the diagnosis could not be saved: {error}"));
                None
            }
        };
        self.progress.warn(step, &diagnosis.to_string());
        Err(Error::NonFinite { diagnosis: Box::new(diagnosis), file })
    }

    /// Advances to the next step.
    fn count(&mut self, computed: &Computed) {
        let state = &mut self.state;
        if state.step == 0 {
            self.last.first = Some(computed.loss).filter(|loss| loss.is_finite());
        }
        state.step += 1;
        state.updates = self.learner.updates();
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
            let text = format!("loss spike: the loss is {:.4}, its running mean {before:.4}", computed.loss);
            self.progress.warn(self.state.step, &text);
        }
        if let (Some(nonpositive), false) = (computed.nonpositive, self.last.denominator_reported) {
            self.last.denominator_reported = true;
            let text = format!("{nonpositive}; the loss is finite, so training continues; this warning is printed once per session");
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
        self.note(Line::Train(train))
    }

    fn note(&mut self, line: Line) -> Result<()> {
        self.writer.as_mut().map_or(Ok(()), |writer| writer.metrics.add(&line))
    }

    fn evaluate(&mut self) -> Result<()> {
        let &Settings { batch, length, eval_length, eval_batches, .. } = self.settings;
        let length = eval_length.unwrap_or(length);
        let together = self.learner.measures_together();
        let collective: &dyn Collective = if together { &Alone } else { self.collective };
        let (source, learner) = (self.source, &mut self.learner);
        let (rank, ranks) = (collective.rank() as u64, collective.size() as u64);
        let (sums, _) = std::thread::scope(|scope| {
            // Only the share of this rank.
            let mut prefetch = Prefetch::start(scope, move |own, rows: &mut Rows| {
                let index = own * ranks + rank;
                Ok((eval_batches == 0 || index < eval_batches) && source.held_out(index, batch, length, rows)?)
            });
            let next = |rows: &mut Rows, wanted: bool| -> Result<bool> {
                Ok(!wanted || prefetch.next()?.map(|found| prefetch.reuse(std::mem::replace(rows, found))).is_some())
            };
            eval::over_ranks(collective, next, |rows| learner.loss(rows))
        })?;
        let evaluation = sums.finish(source.best_loss());
        let step = self.state.step;
        if evaluation.tokens == 0 {
            self.progress.warn(step, "there is no held-out data to evaluate on");
            return Ok(());
        }
        self.last.diverged = !evaluation.loss.is_finite();
        if self.last.diverged {
            self.last.held_out = None;
            self.progress.warn(step, &format!("the held-out loss is {}", evaluation.loss));
            return self.note(Line::HeldOut { step, time: now(), evaluation: None });
        }
        self.progress.held_out(step, &evaluation);
        self.state.held_out = Some(evaluation.loss);
        if self.state.best.is_none_or(|best| evaluation.loss < best.loss) {
            self.state.best = Some(Best { step, loss: evaluation.loss });
        }
        self.last.held_out = Some(evaluation);
        self.note(Line::HeldOut { step, time: now(), evaluation: Some(evaluation) })
    }

    /// Writes a checkpoint, unless this step has one: a stop may follow directly after a scheduled checkpoint.
    fn save(&mut self) -> Result<()> {
        if self.saved == Some(self.state.step) {
            return Ok(());
        }
        self.learner.collect()?;
        if let Some(Writer { checkpoints, metrics, replacement, .. }) = &mut self.writer {
            // Metrics first: they must include all steps up to the checkpoint.
            metrics.sync()?;
            let path = checkpoints.save(&*self.learner, &self.state, self.settings, &self.options.files)?;
            if let Some(Err(error)) = replacement.as_mut().map(Replacement::commit) {
                self.progress.warn(self.state.step, &format!("the replaced run could not be removed completely: {error}"));
            }
            checkpoints.prune(self.state.step, self.settings.keep)?;
            self.checkpoint = Some(path);
        }
        self.saved = Some(self.state.step);
        Ok(())
    }

    fn finish(&mut self) -> Result<Outcome> {
        if self.checkpoint.is_none() {
            self.save()?;
        }
        if let Some(writer) = &self.writer {
            writer.metrics.finish(self.state.step)?;
        }
        let diverged = self.last.diverged || self.diverged();
        // A rank that ends before rank 0 has finished writing would also end rank 0.
        self.collective.barrier()?;
        let (time, tokens) = self.last.session;
        Ok(Outcome {
            folder: self.options.folder.clone(),
            step: self.state.step,
            finished: self.state.step >= self.settings.steps,
            checkpoint: self.checkpoint.clone().unwrap_or_default(),
            loss: self.last.loss,
            held_out: self.last.held_out,
            diverged,
            best: self.state.best,
            skipped: self.state.skipped,
            warnings: self.progress.count,
            tokens_per_second: if tokens == 0 { 0.0 } else { tokens as f64 / time.as_secs_f64().max(1e-9) },
        })
    }
}

impl Training<'_> {
    /// Whether the last loss is far above that of the first step or of a uniform prediction; emits a warning if so.
    fn diverged(&mut self) -> bool {
        let last = self.last.held_out.map(|evaluation| evaluation.loss).filter(|_| self.state.held_out.is_some()).or(self.last.loss);
        let uniform = (self.source.vocabulary() as f64).ln();
        let expected = self.last.first.map_or(uniform, |first| first.min(uniform));
        let Some(loss) = last.filter(|&loss| self.state.step >= self.settings.steps && loss > expected + DIVERGED) else { return false };
        let first = self.last.first.map_or(String::new(), |first| format!(", and the loss of step 1 was {first:.4}"));
        let text = format!(
            "training diverged: the last loss is {loss:.4}, that of a uniform prediction is {uniform:.4} (ln of the vocabulary size){first}; reduce --lr, or increase --warmup"
        );
        self.progress.warn(self.state.step, &text);
        true
    }
}

/// Increase over the initial loss, in nats, that exceeds the noise of small batches.
const DIVERGED: f64 = 1.0;

/// Checks that all ranks have the same build, settings, data and step.
fn agree_on_run(collective: &dyn Collective, settings: &Settings, source: &dyn Source, options: &RunOptions, state: &State) -> Result<()> {
    if collective.size() == 1 {
        return Ok(());
    }
    let same = |what: &'static str, own: String| {
        let found = collective.gather(own.as_bytes())?;
        if found.iter().all(|other| *other == found[0]) {
            return Ok(());
        }
        Err(Error::RanksDiffer { what, found: found.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect() })
    };
    same("the build or its instruction set", options.provenance.name())?;
    same("the settings", settings.hash())?;
    same("the data", source.fingerprint())?;
    same("the step", state.step.to_string())
}

/// Describes how ranks share a step.
fn shared(ranks: usize, micro_batches: usize) -> String {
    let idle = ranks.saturating_sub(micro_batches);
    let mut text = format!("{ranks} ranks share {micro_batches} micro-batches per step");
    if idle > 0 {
        text += &format!(": {idle} of them are idle; start the run with --micro-batches {ranks} or more");
    } else if !micro_batches.is_multiple_of(ranks) {
        text += ": some ranks have one more than others, which wait for them; the result is the same";
    }
    text + ". If a rank terminates, all ranks stop; --resume continues from the newest checkpoint with any number of ranks"
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
        let checkpoints = Checkpoints::new(folder.path().join("checkpoints"));
        let writer = Writer::open(folder.path(), checkpoints.clone(), 0, None).expect("a folder");
        let mut training = Training::new(&settings, source.as_ref(), &options, Some(writer), begin, Vec::new()).expect("a training");
        let file = |step| std::fs::metadata(checkpoints.place(step).join("manifest.json")).map(|file| (file.ino(), file.mtime_nsec()));
        training.save().expect("a checkpoint");
        let first = file(0).expect("a manifest");
        training.save().expect("the same");
        assert_eq!(file(0).expect("a manifest"), first, "it was written again");
        training.state.step = 1;
        training.save().expect("the next");
        assert!(file(1).is_ok());
    }
}
