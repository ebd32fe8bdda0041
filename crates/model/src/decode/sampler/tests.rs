use proptest::prelude::*;

use super::*;

/// Probabilities after all filters by their definitions, dense over the vocabulary, computed without sorting candidates together.
fn plain(logits: &[f32], seen: &[u32], s: &SamplingOptions) -> Vec<f64> {
    let softmax = |x: &[f64]| {
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = x.iter().map(|x| (x - max).exp()).sum();
        x.iter().map(|x| (x - max).exp() / total).collect::<Vec<f64>>()
    };
    let mut x: Vec<f64> = logits.iter().map(|&x| x as f64).collect();
    for (token, x) in x.iter_mut().enumerate() {
        if seen.contains(&(token as u32)) {
            *x = if *x > 0.0 { *x / s.repetition_penalty } else { *x * s.repetition_penalty };
        }
        *x /= s.temperature;
    }
    if s.top_k > 0 {
        // Kept if fewer than k are larger.
        let before = x.clone();
        for x in &mut x {
            if before.iter().filter(|&other| other > x).count() >= s.top_k {
                *x = f64::NEG_INFINITY;
            }
        }
    }
    if s.top_p < 1.0 {
        let (p, before) = (softmax(&x), x.clone());
        for (i, x) in x.iter_mut().enumerate() {
            let larger = |j: &usize| before[*j] > before[i] || (before[*j] == before[i] && *j < i);
            if (0..p.len()).filter(larger).map(|j| p[j]).sum::<f64>() >= s.top_p {
                *x = f64::NEG_INFINITY;
            }
        }
    }
    if s.min_p > 0.0 {
        let p = softmax(&x);
        let max = p.iter().copied().fold(0.0, f64::max);
        for (x, p) in x.iter_mut().zip(&p) {
            if *p < s.min_p * max {
                *x = f64::NEG_INFINITY;
            }
        }
    }
    softmax(&x)
}

/// The distribution that the sampler draws from, dense.
fn filtered(logits: &[f32], seen: &[u32], s: SamplingOptions) -> Vec<f64> {
    let mut sampler = Sampler::new(s, logits.len()).expect("valid");
    sampler.mark_seen(seen);
    sampler.sample(logits);
    let total: f64 = sampler.candidates.iter().map(|c| c.weight).sum();
    let mut dense = vec![0.0; logits.len()];
    for c in &sampler.candidates {
        dense[c.token as usize] = c.weight / total;
    }
    dense
}

fn logits() -> impl Strategy<Value = Vec<f32>> {
    // Few distinct values, so many are equal; some lists have widely spread values.
    prop_oneof![prop::collection::vec((-8i8..8).prop_map(|x| x as f32 / 2.0), 1..40), prop::collection::vec(-30f32..30.0, 1..40)]
}

proptest! {
    #[test]
    fn filters_match_their_definitions(
        logits in logits(),
        seen in prop::collection::vec(0u32..40, 0..6),
        temperature in 0.05f64..4.0,
        top_k in 0usize..12,
        // Whole steps would hit cumulative probabilities exactly, where rounding decides.
        (top_p, min_p) in (prop_oneof![Just(1.0), 0.0123f64..0.9987], prop_oneof![Just(0.0), 0.0123f64..0.9987]),
        repetition_penalty in prop_oneof![Just(1.0), 0.3f64..3.0],
    ) {
        let s = SamplingOptions { temperature, top_k, top_p, min_p, repetition_penalty, seed: 3 };
        let (found, expected) = (filtered(&logits, &seen, s), plain(&logits, &seen, &s));
        for (token, (found, expected)) in found.iter().zip(&expected).enumerate() {
            prop_assert!((found - expected).abs() < 1e-9, "token {token}: {found} {expected}, {s:?}");
        }
    }

    #[test]
    fn greedy_takes_the_first_largest_logit_after_the_penalty(logits in logits(), seen in prop::collection::vec(0u32..40, 0..6), penalty in 0.3f64..3.0) {
        let mut sampler = Sampler::new(SamplingOptions::default().repetition_penalty(penalty), logits.len()).expect("valid");
        sampler.mark_seen(&seen);
        let s = SamplingOptions::default().temperature(1.0).repetition_penalty(penalty);
        let p = plain(&logits, &seen, &s);
        let best = (0..p.len()).rev().max_by(|&a, &b| p[a].total_cmp(&p[b])).expect("one");
        let found = sampler.sample(&logits) as usize;
        prop_assert!(found == best || (p[found] - p[best]).abs() < 1e-12);
    }
}

#[test]
fn draws_follow_the_filtered_distribution() {
    let logits = [1.0f32, 0.0, 2.0, -1.0, 1.5, -3.0];
    let s = SamplingOptions { temperature: 0.8, top_k: 5, top_p: 0.97, min_p: 0.05, repetition_penalty: 1.2, seed: 11 };
    let expected = plain(&logits, &[2], &s);
    let n = 40_000;
    let mut counts = [0.0; 6];
    for seed in 0..n {
        let mut sampler = Sampler::new(s.seed(seed), 6).expect("valid");
        sampler.mark_seen(&[2]);
        counts[sampler.sample(&logits) as usize] += 1.0 / n as f64;
    }
    for (found, expected) in counts.iter().zip(&expected) {
        assert!((found - expected).abs() < 0.012, "{counts:?} {expected:?}");
    }
    assert!(expected.contains(&0.0));
}

#[test]
fn draws_depend_on_seed_and_index() {
    let s = SamplingOptions::default().temperature(1.0).seed(4);
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 / 3.0).collect();
    let mut one = Sampler::new(s, 50).expect("valid");
    let all: Vec<u32> = (0..20).map(|_| one.sample(&logits)).collect();
    // Each draw differs: over many draws, token frequencies match their probabilities.
    let mut many = Sampler::new(s, 50).expect("valid");
    let (n, p) = (50_000, plain(&logits, &[], &s));
    let mut counts = [0.0; 50];
    (0..n).for_each(|_| counts[many.sample(&logits) as usize] += 1.0 / n as f64);
    assert!(counts.iter().zip(&p).all(|(found, expected)| (found - expected).abs() < 0.005), "{counts:?}");
    let mut later = Sampler::new(s, 50).expect("valid");
    later.skip_to(12);
    assert_eq!((0..8).map(|_| later.sample(&logits)).collect::<Vec<_>>(), all[12..]);
    assert_eq!(later.draws(), 20);
    let mut other = Sampler::new(s.seed(5), 50).expect("valid");
    assert_ne!((0..20).map(|_| other.sample(&logits)).collect::<Vec<_>>(), all);
}

#[test]
fn sampled_tokens_are_penalized_afterwards() {
    let mut sampler = Sampler::new(SamplingOptions::default().repetition_penalty(3.0), 3).expect("valid");
    let logits = [2.0, 3.0, -1.0];
    assert_eq!([0; 3].map(|_| sampler.sample(&logits)), [1, 0, 1]);
    sampler.mark_seen(&[0, 1, 2, 77]);
    assert_eq!(sampler.sample(&[-1.0, -2.0, -1.5]), 0);
}

#[test]
fn invalid_options_are_rejected() {
    let s = SamplingOptions::default();
    for (bad, name) in [
        (s.temperature(-0.1), "temperature"),
        (s.temperature(f64::NAN), "temperature"),
        (s.top_p(0.0), "top-p"),
        (s.top_p(1.1), "top-p"),
        (s.min_p(-0.1), "min-p"),
        (s.min_p(f64::NAN), "min-p"),
        (s.repetition_penalty(0.0), "repetition"),
        (s.repetition_penalty(f64::INFINITY), "repetition"),
    ] {
        let error = Sampler::new(bad, 3).expect_err(name).to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn extreme_temperatures_and_penalties_take_the_most_probable_token() {
    let logits = [1.0, 3.0, -2.0, 2.9999998];
    for temperature in [1e-310, f64::MIN_POSITIVE, 1e-12] {
        let mut sampler = Sampler::new(SamplingOptions::default().temperature(temperature), 4).expect("valid");
        assert_eq!(sampler.sample(&logits), 1, "{temperature:e}");
    }
    for (repetition_penalty, expected) in [(1e308, 1), (1e-308, 0)] {
        let mut sampler =
            Sampler::new(SamplingOptions::default().temperature(0.5).repetition_penalty(repetition_penalty), 4).expect("valid");
        sampler.mark_seen(&[0, 2]);
        assert_eq!(sampler.sample(&[f32::MAX, 3e38, f32::MIN, 0.0]), expected, "{repetition_penalty:e}");
    }
}
