//! The fused engine against the reference, instruction set against instruction set, threads against threads.

use std::sync::{Mutex, MutexGuard};

use termwise_attention::presets;
use termwise_attention::simd::{self, Isa};
use termwise_attention::{Error, FusedOptions, Real, Shape, Variant};

use super::bounds::Expected;
use super::draw::random_variant;
use super::outcome::{Case, Identity, Unit};
use crate::layer::{Layer, Results, Sizes};
use termwise_base::rng::Rng;
use termwise_base::threads as pools;

/// What the checks go over: every preset, then random combinations.
#[derive(Clone)]
pub struct Subject {
    /// A preset's name, or a number for a random combination.
    pub name: String,
    /// How people read it.
    pub label: String,
    pub variant: Variant,
}

/// Every preset that all engines compute, and that many random combinations.
pub fn subjects(seed: u64, cases: usize) -> Vec<Subject> {
    let named = presets::all().iter().map(|preset| {
        let name = preset.name.to_string();
        Subject { label: name.clone(), name, variant: preset.parts() }
    });
    let drawn = (0..cases).map(|index| {
        let name = format!("random {index}");
        let variant = random_variant(&mut Rng::named(seed, &name));
        Subject { label: variant.to_string(), name, variant }
    });
    named.chain(drawn).collect()
}

/// The instruction set is one for the whole process: checks that choose one, or that compare bits, take turns.
static INSTRUCTIONS: Mutex<()> = Mutex::new(());

pub(super) fn alone() -> MutexGuard<'static, ()> {
    INSTRUCTIONS.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

pub(super) fn run_fused(layer: &Layer<f32>) -> Result<Results<f32>, Error> {
    layer.run(&mut layer.fused(FusedOptions::default())?)
}

/// The case of a subject and its random numbers.
pub(super) fn begin(identity: Identity, subject: &Subject, seed: u64) -> (Case, Rng) {
    (Case::new(identity, &subject.label), Rng::named(seed, &format!("{} {}", identity.name(), subject.name)))
}

/// A layer of a subject; the sizes go into the case.
pub(super) fn layer<R: Real>(subject: &Subject, shape: Shape, spread: f64, rng: &mut Rng, case: &mut Case) -> Result<Layer<R>, Error> {
    case.detail = Sizes::from(shape).to_string();
    Layer::uniform(&subject.variant, shape, spread, rng)
}

/// Lengths for [`fused`]: the first are shorter than any tile, the second around and beyond the border of one.
pub const LENGTHS: [&[usize]; 2] = [&[1, 2, 5, 17], &[63, 64, 65, 100, 131]];

/// Outputs and all gradients of the fused engine against the reference in float64, at one of these lengths; odd sizes, grouped
/// heads, padding.
pub fn fused(subject: &Subject, lengths: &[usize], seed: u64) -> Case {
    let (case, mut rng) = begin(Identity::Fused, subject, seed ^ lengths.len() as u64);
    case.fill(|case| {
        let (heads, kv_heads) = rng.pick(&[(1, 1), (4, 2), (6, 3), (4, 1)]);
        let (d, e) = (rng.pick(&[2, 8, 16, 24, 32]), rng.pick(&[5, 16, 20, 48]));
        let time = rng.pick(lengths);
        let shape = Shape { batch: rng.pick(&[1, 2]), time, heads, kv_heads, d, e };
        // A spread of 2 takes scores beyond the clamp of 5.
        let mut layer = layer::<f32>(subject, shape, 2.0, &mut rng, case)?;
        if rng.chance(0.5) {
            layer.lengths = Some((0..shape.batch).map(|_| 1 + rng.below(time)).collect());
            case.detail += " padded";
        }
        let expected = Expected::of(&layer, &mut rng)?;
        let found = {
            let _guard = alone();
            run_fused(&layer)?
        };
        expected.compare(&found, "", case);
        Ok::<(), Error>(())
    })
}

/// As [`fused`], once for every instruction set that the machine has.
pub fn instruction_sets(subject: &Subject, seed: u64) -> Case {
    let (case, mut rng) = begin(Identity::InstructionSets, subject, seed);
    case.fill(|case| {
        let shape = Shape { batch: 1, time: 70, heads: 2, kv_heads: 1, d: 20, e: 12 };
        let layer = layer::<f32>(subject, shape, 2.0, &mut rng, case)?;
        let expected = Expected::of(&layer, &mut rng)?;
        let _guard = alone();
        let before = simd::isa();
        for isa in Isa::available() {
            simd::choose(isa);
            let found = run_fused(&layer);
            simd::choose(before);
            expected.compare(&found?, &format!("{} ", isa.name()), case);
        }
        Ok::<(), Error>(())
    })
}

/// Outputs and gradients on 1, 2, 3 and 7 threads, bit by bit.
pub fn threads(subject: &Subject, seed: u64) -> Case {
    let (case, mut rng) = begin(Identity::Threads, subject, seed);
    case.fill(|case| {
        let shape = Shape { batch: 2, time: 150, heads: 4, kv_heads: 2, d: 16, e: 12 };
        let layer = layer::<f32>(subject, shape, 1.0, &mut rng, case)?;
        let _guard = alone();
        let on = |threads: usize| -> Result<Results<f32>, crate::Error> { Ok(pools::pool(threads)?.install(|| run_fused(&layer))?) };
        let one = on(1)?;
        for threads in [2, 3, 7] {
            let other = on(threads)?;
            let gradients = one.gradients.iter().zip(&other.gradients);
            let count = different_bits(&one.y, &other.y) + gradients.map(|((_, a), (_, b))| different_bits(a, b)).sum::<usize>();
            case.measure(format!("values that differ on {threads} threads"), count as f64, 0.0, Unit::Count);
        }
        Ok::<(), crate::Error>(())
    })
}

fn different_bits(a: &[f32], b: &[f32]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count()
}
