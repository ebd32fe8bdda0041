//! Whole models: gradients against finite differences, threads, causality, padding, grouped heads, tied embeddings.

use crate::common;

use common::{logits, loss_and_grad, tiny, tokens};
use termwise_attention::relative_rms;
use termwise_model::{AttentionEngine, Batch, Error, Loss, Model, Objective, Params, Precision, Session, SessionOptions};

const VARIANTS: [&str; 8] = [
    "softmax",
    "gated_softmax",
    "gated_softmax_cumgate",
    "gated_softmax_decay",
    "gated_softmax_post_out_gate_L2norm_nodivS_noclamp",
    "softmax_detach_denom_gate",
    "linear_cosine",
    "linear_elu",
];
const ENGINES: [AttentionEngine; 2] = [AttentionEngine::Reference, AttentionEngine::Fused];

/// Labels, some of them ignored.
fn labels(ids: &[u32]) -> Vec<i32> {
    ids.iter().enumerate().map(|(i, &id)| if i % 5 == 2 { -100 } else { (id * 3 + 1) as i32 % 29 }).collect()
}

#[test]
fn gradients_match_finite_differences_of_the_loss() {
    let (rows, time) = (2, 9);
    let ids = tokens(rows * time, 29, 1);
    let labels = labels(&ids);
    let batch = Batch::new(&ids, &labels);
    for attention in VARIANTS.into_iter().filter(|attention| !attention.contains("detach")) {
        for (kv_heads, tied) in [(4, false), (2, true)] {
            let mut model = tiny(attention, kv_heads, tied);
            if attention.ends_with("cumgate") {
                // Away from the kink of max(1, Σ), where the loss is not differentiable.
                for layer in 0..2 {
                    let name = format!("model.layers.{layer}.self_attn.out_gate_proj.bias");
                    model.params.get_mut(&name).expect("listed").iter_mut().for_each(|b| *b += 4.0);
                }
            }
            let (_, grads) = loss_and_grad(&model, &batch, rows, AttentionEngine::Fused);
            let mut session = model.session(rows, time, SessionOptions::default()).expect("a session");
            for (entry, gradient) in grads.iter() {
                // Along the gradient the loss changes most, which is the most accurate direction in float32: its slope is ‖g‖.
                let norm = gradient.iter().map(|&g| (g as f64).powi(2)).sum::<f64>().sqrt();
                if norm < 1e-4 {
                    continue;
                }
                let step = (0.005 / norm).min(0.01);
                let start = model.params.clone();
                let mut at = |side: f64| {
                    let values = model.params.get_mut(&entry.spec.name).expect("listed");
                    let from = start.get(&entry.spec.name).expect("listed");
                    for ((value, &from), &g) in values.iter_mut().zip(from).zip(gradient) {
                        *value = (from as f64 + side * step * g as f64 / norm) as f32;
                    }
                    session.loss(&model.params, &batch).expect("a loss").mean()
                };
                // Four points: the cubic term cancels, so the step may be large enough for float32.
                let slope = (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * step);
                model.params = start;
                // The second term is the rounding error of the loss divided by the step.
                assert!(
                    (slope - norm).abs() < 1e-3 * norm + 1e-4,
                    "{attention}, {kv_heads} kv heads, {}: slope {slope:.6}, gradient {norm:.6}",
                    entry.spec.name
                );
            }
        }
    }
}

/// The same model with biases of q, k, v and, in a Llama, of the output.
fn with_biases(family: &str) -> Model {
    let plain = tiny("softmax", 2, false);
    let mut text: serde_json::Value = serde_json::from_str(&plain.config.to_json_string()).expect("JSON");
    text["model_type"] = family.into();
    text["attention_bias"] = (family == "llama").into();
    let config = termwise_model::Config::from_json_str(&text.to_string(), family).expect("a configuration");
    let mut model = Model::fresh(config, 1).expect("a model");
    let layout = model.params.layout().clone();
    for entry in layout.entries() {
        let values = &mut model.params.values_mut()[entry.range()];
        match plain.params.get(&entry.spec.name) {
            Ok(from) => values.copy_from_slice(from),
            Err(_) => values.iter_mut().enumerate().for_each(|(i, b)| *b = 0.3 * ((i * 29 % 13) as f32 / 6.0 - 1.0)),
        }
    }
    model
}

#[test]
fn gradients_of_biases_match_finite_differences() {
    let (rows, time) = (2, 9);
    let ids = tokens(rows * time, 29, 1);
    let labels = labels(&ids);
    let batch = Batch::new(&ids, &labels);
    for (family, biases) in [("qwen2", 6), ("llama", 8)] {
        let mut model = with_biases(family);
        let (_, grads) = loss_and_grad(&model, &batch, rows, AttentionEngine::Fused);
        let mut session = model.session(rows, time, SessionOptions::default()).expect("a session");
        let names: Vec<String> = grads.iter().map(|(entry, _)| entry.spec.name.clone()).filter(|name| name.ends_with(".bias")).collect();
        assert_eq!(names.len(), biases, "{names:?}");
        for name in names {
            let gradient = grads.get(&name).expect("listed");
            let norm = gradient.iter().map(|&g| (g as f64).powi(2)).sum::<f64>().sqrt();
            // A bias of k shifts all scores of a query equally except for RoPE: its gradient is small but not zero.
            assert!(norm > 1e-5, "{family}: {name} has no gradient");
            let step = (0.01 / norm).min(0.05);
            let start = model.params.get(&name).expect("listed").to_vec();
            let mut at = |side: f64| {
                let values = model.params.get_mut(&name).expect("listed").iter_mut();
                values.zip(&start).zip(gradient).for_each(|((b, &from), &g)| *b = (from as f64 + side * step * g as f64 / norm) as f32);
                session.loss(&model.params, &batch).expect("a loss").mean()
            };
            let slope = (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * step);
            model.params.get_mut(&name).expect("listed").copy_from_slice(&start);
            assert!((slope - norm).abs() < 2e-3 * norm + 1e-4, "{family}, {name}: slope {slope:.6}, gradient {norm:.6}");
        }
    }
}

#[test]
fn every_parameter_has_a_gradient_at_the_first_step() {
    for attention in VARIANTS {
        let model = tiny(attention, 2, false);
        let ids = tokens(24, 29, 1);
        let (_, grads) = loss_and_grad(&model, &Batch::new(&ids, &labels(&ids)), 2, AttentionEngine::Fused);
        // A gate before a scale-free norm cancels: its gradient is zero by construction.
        let cancels = |name: &str| attention.contains("L2norm") && name.contains("out_gate") && !attention.contains("post");
        for (entry, gradient) in grads.iter().filter(|(entry, _)| !cancels(&entry.spec.name)) {
            assert!(gradient.iter().any(|&g| g != 0.0), "{attention}: {} has no gradient", entry.spec.name);
            assert!(gradient.iter().all(|g| g.is_finite()), "{attention}: {} is not finite", entry.spec.name);
        }
    }
}

#[test]
fn gradients_accumulate_over_micro_batches() {
    let model = tiny("gated_softmax", 2, true);
    let ids = tokens(24, 29, 1);
    let labels = labels(&ids);
    let (whole, expected) = loss_and_grad(&model, &Batch::new(&ids, &labels), 2, AttentionEngine::Fused);
    let mut session = model.session(1, 12, SessionOptions::default()).expect("a session");
    let (mut grads, mut sum, mut count) = (model.params.zeros_like().expect("memory"), 0.0, 0);
    for part in [0..12, 12..24] {
        let batch = Batch::new(&ids[part.clone()], &labels[part]).tokens(Some(whole.count));
        let loss = session.loss_and_grad(&model.params, &batch, &mut grads).expect("a loss");
        (sum, count) = (sum + loss.sum, count + loss.count);
    }
    assert_eq!(count, whole.count);
    assert!((sum - whole.sum).abs() < 1e-5 * whole.sum);
    assert!(relative_rms(grads.values(), expected.values()) < 1e-5);
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let (rows, time) = (3, 150);
    let ids = tokens(rows * time, 29, 1);
    let labels = labels(&ids);
    let lengths = [150, 70, 33];
    for attention in VARIANTS {
        let model = tiny(attention, 2, false);
        let run = |threads: usize| -> (Loss, Params) {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| loss_and_grad(&model, &Batch::new(&ids, &labels).lengths(Some(&lengths)), rows, AttentionEngine::Fused))
        };
        let bits = |grads: &Params| grads.values().iter().map(|g| g.to_bits()).collect::<Vec<_>>();
        let (loss, grads) = run(1);
        for threads in [2, 3, 5] {
            let (other_loss, other_grads) = run(threads);
            assert_eq!(loss.sum.to_bits(), other_loss.sum.to_bits(), "{attention}: loss on {threads} threads");
            assert!(bits(&grads) == bits(&other_grads), "{attention}: gradients on {threads} threads");
        }
    }
}

/// Large enough for products, norms and the head to be split among threads.
#[test]
fn bits_do_not_depend_on_the_number_of_threads_at_a_larger_width() {
    let mut config = tiny("softmax", 2, false).config;
    (config.hidden_size, config.head_dim, config.intermediate_size, config.vocab_size) = (128, 32, 320, 700);
    let model = Model::fresh(config, 3).expect("a model");
    let ids = tokens(2 * 300, 700, 1);
    let labels: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let (loss, grads) = pool.install(|| loss_and_grad(&model, &Batch::new(&ids, &labels), 2, AttentionEngine::Fused));
        (loss.sum.to_bits(), grads.values().iter().map(|g| g.to_bits()).collect::<Vec<_>>())
    };
    let one = run(1);
    for threads in [2, 3, 5] {
        assert!(one == run(threads), "{threads} threads");
    }
}

#[test]
fn later_tokens_do_not_change_earlier_logits() {
    let time = 40;
    let ids = tokens(time, 29, 1);
    for attention in VARIANTS {
        let model = tiny(attention, 2, false);
        for engine in ENGINES {
            let before = logits(&model, &ids, None, 1, engine);
            for from in [1, 7, 32, 39] {
                let mut changed = ids.clone();
                changed[from..].iter_mut().for_each(|id| *id = (*id + 11) % 29);
                let after = logits(&model, &changed, None, 1, engine);
                assert!(before[..from * 29] == after[..from * 29], "{attention}, {engine:?}: changed from {from} on");
                assert!(before[from * 29..][..29] != after[from * 29..][..29], "{attention}, {engine:?}: nothing changed at {from}");
            }
        }
    }
}

#[test]
fn padded_rows_equal_separate_runs() {
    let (time, lengths) = (20, [20, 13, 1]);
    let ids = tokens(3 * time, 29, 1);
    let labels = labels(&ids);
    for attention in VARIANTS {
        let model = tiny(attention, 2, false);
        for engine in ENGINES {
            let batch = Batch::new(&ids, &labels).lengths(Some(&lengths));
            let (loss, grads) = loss_and_grad(&model, &batch, 3, engine);
            let all = logits(&model, &ids, Some(&lengths), 3, engine);
            let (mut sum, mut count, mut expected) = (0.0, 0, model.params.zeros_like().expect("memory"));
            for (row, &length) in lengths.iter().enumerate() {
                let part = row * time..row * time + length;
                let mut session = model.session(1, length, SessionOptions::default().engine(engine)).expect("a session");
                let own = Batch::new(&ids[part.clone()], &labels[part.clone()]).tokens(Some(loss.count));
                let loss = session.loss_and_grad(&model.params, &own, &mut expected).expect("a loss");
                (sum, count) = (sum + loss.sum, count + loss.count);
                let error = relative_rms(&all[part.start * 29..part.end * 29], &logits(&model, &ids[part], None, 1, engine));
                assert!(error < 1e-6, "{attention}, {engine:?}: logits of row {row}, relative RMS {error:.2e}");
            }
            assert_eq!(count, loss.count);
            assert!((sum - loss.sum).abs() < 1e-6 * sum, "{attention}, {engine:?}: {sum} {}", loss.sum);
            let error = relative_rms(grads.values(), expected.values());
            assert!(error < 1e-5, "{attention}, {engine:?}: gradients, relative RMS {error:.2e}");
        }
    }
}

#[test]
fn padding_does_not_attend_to_the_sequence() {
    let (time, length) = (12, 7);
    let ids = tokens(time, 29, 1);
    let mut changed = ids.clone();
    changed[..length].iter_mut().for_each(|id| *id = (*id + 11) % 29);
    for attention in VARIANTS {
        let model = tiny(attention, 2, false);
        for engine in ENGINES {
            let [before, after] = [&ids, &changed].map(|ids| logits(&model, ids, Some(&[length]), 1, engine));
            assert!(before[..29] != after[..29], "{attention}, {engine:?}: nothing changed");
            assert!(before[length * 29..] == after[length * 29..], "{attention}, {engine:?}: padding attends to the sequence");
        }
    }
}

#[test]
fn grouped_heads_equal_repeated_ones() {
    for attention in VARIANTS {
        let grouped = tiny(attention, 2, false);
        let mut full = tiny(attention, 4, false);
        let layout = full.params.layout().clone();
        for entry in layout.entries() {
            let name = &entry.spec.name;
            let from = grouped.params.get(name).expect("the same names");
            let to = full.params.get_mut(name).expect("listed");
            if from.len() == to.len() {
                to.copy_from_slice(from);
                continue;
            }
            // k, v and the input gate: each kv head twice.
            let head = from.len() / 2;
            for (i, to) in to.chunks_exact_mut(head).enumerate() {
                to.copy_from_slice(&from[i / 2 * head..][..head]);
            }
        }
        let ids = tokens(2 * 17, 29, 1);
        for engine in ENGINES {
            let error = relative_rms(&logits(&grouped, &ids, None, 2, engine), &logits(&full, &ids, None, 2, engine));
            assert!(error < 1e-6, "{attention}, {engine:?}: relative RMS {error:.2e}");
        }
    }
}

#[test]
fn a_tied_head_adds_its_gradient_to_the_embedding() {
    let tied = tiny("softmax", 4, true);
    let mut untied = tiny("softmax", 4, false);
    for (entry, values) in tied.params.iter() {
        untied.params.get_mut(&entry.spec.name).expect("listed").copy_from_slice(values);
    }
    let embedding = tied.params.get("model.embed_tokens.weight").expect("an embedding");
    assert_eq!(tied.params.get("lm_head.weight").expect("the same"), embedding);
    untied.params.get_mut("lm_head.weight").expect("a head").copy_from_slice(embedding);
    let ids = tokens(24, 29, 1);
    let labels = labels(&ids);
    let (loss, grads) = loss_and_grad(&tied, &Batch::new(&ids, &labels), 2, AttentionEngine::Fused);
    let (other, parts) = loss_and_grad(&untied, &Batch::new(&ids, &labels), 2, AttentionEngine::Fused);
    assert_eq!(loss, other);
    let part = |name: &str| parts.get(name).expect("a gradient").to_vec();
    let sum: Vec<f32> = part("model.embed_tokens.weight").iter().zip(part("lm_head.weight")).map(|(a, b)| a + b).collect();
    assert!(relative_rms(grads.get("model.embed_tokens.weight").expect("a gradient"), &sum) < 1e-6);
}

#[test]
fn naive_and_fused_engines_agree() {
    let ids = tokens(2 * 33, 29, 1);
    let labels = labels(&ids);
    for attention in VARIANTS {
        let model = tiny(attention, 2, false);
        let run = |engine| loss_and_grad(&model, &Batch::new(&ids, &labels), 2, engine);
        let ((fused, fused_grads), (plain, plain_grads)) = (run(AttentionEngine::Fused), run(AttentionEngine::Reference));
        assert!((fused.mean() - plain.mean()).abs() < 1e-5, "{attention}: {} {}", fused.mean(), plain.mean());
        let error = relative_rms(fused_grads.values(), plain_grads.values());
        assert!(error < 1e-4, "{attention}: gradients, relative RMS {error:.2e}");
    }
}

#[test]
fn a_nonpositive_denominator_is_reported() {
    let mut model = tiny("softmax", 4, false);
    model.config.attention.set_layer(1, "feature=relu".parse().expect("a variant"));
    // With zero queries all features are zero, and so is the sum.
    model.params.get_mut("model.layers.1.self_attn.q_proj.weight").expect("listed").fill(0.0);
    let ids = tokens(8, 29, 1);
    for engine in ENGINES {
        let (loss, _) = loss_and_grad(&model, &Batch::new(&ids, &labels(&ids)), 1, engine);
        let found = loss.nonpositive.expect("reported");
        assert_eq!((found.layer, found.head, found.row, found.position, found.value), (1, 0, 0, 0, 0.0));
        assert!(found.to_string().contains("layer 1, head 0"), "{found}");
    }
}

#[test]
fn a_residual_with_overflowing_squares_is_normalized() {
    let ids = tokens(18, 29, 1);
    let labels = labels(&ids);
    // The contributions of the layers are negligible next to such an embedding, so its size does not matter.
    let loss = |size: f32| {
        let mut model = tiny("softmax", 4, false);
        model.params.get_mut("model.embed_tokens.weight").expect("listed").iter_mut().for_each(|x| *x *= size);
        loss_and_grad(&model, &Batch::new(&ids, &labels), 2, AttentionEngine::Fused).0.mean()
    };
    let (fits, overflows) = (loss(1e12), loss(1e25));
    assert!((fits - overflows).abs() < 1e-5 * fits, "{fits} {overflows}");
    assert!((fits - 29f64.ln()).abs() > 1e-3, "a zero norm would give the loss of a uniform prediction");
}

#[test]
fn invalid_batches_are_rejected_with_their_position() {
    let model = tiny("softmax", 4, false);
    let mut session = model.session(2, 3, SessionOptions::default()).expect("a session");
    let good = [1, 2, 3, 4, 5, 6];
    let mut message = |batch: Batch| session.loss(&model.params, &batch).map(|_| ()).expect_err("refused").to_string();
    let text = message(Batch::new(&good[..5], &[0; 6]));
    assert!(text.contains("ids") && text.contains('6') && text.contains('5'), "{text}");
    let text = message(Batch::new(&[1, 2, 3, 4, 29, 6], &[0; 6]));
    assert!(text.contains("token 29 at row 1, position 1") && text.contains("vocabulary size 29"), "{text}");
    let text = message(Batch::new(&good, &[0, 0, -1, 0, 0, 0]));
    assert!(text.contains("label -1 at row 0, position 2"), "{text}");
    let text = message(Batch::new(&good, &[0; 6]).lengths(Some(&[3, 4])));
    assert!(text.contains("length 4 at row 1") && text.contains("between 1 and 3"), "{text}");
}

#[test]
fn a_batch_without_labels_does_not_change_gradients() {
    let model = tiny("softmax", 4, false);
    let ids = tokens(6, 29, 1);
    let (loss, grads) = loss_and_grad(&model, &Batch::new(&ids, &[-100; 6]), 2, AttentionEngine::Fused);
    assert!(loss.count == 0 && loss.sum == 0.0 && loss.mean().is_nan());
    assert!(grads.values().iter().all(|&g| g == 0.0));
}

#[test]
fn training_sessions_reject_eviction_and_quantization() {
    for (text, part) in [("softmax window=4 chosen=2", "chosen"), ("softmax window=4 bits=8", "bits")] {
        let model = tiny(text, 2, false);
        for engine in [AttentionEngine::Fused, AttentionEngine::Reference] {
            let error = model.session(1, 9, SessionOptions::default().engine(engine)).map(drop).expect_err(text).to_string();
            assert!(error.contains(&format!("`{part}` is inference-only")), "{error}");
            let ids = tokens(9, 29, 1);
            let mut session = model.session(1, 9, SessionOptions::default().engine(engine).forward_only(true)).expect("a session");
            assert!(session.loss(&model.params, &Batch::new(&ids, &labels(&ids))).is_ok_and(|loss| loss.mean().is_finite()), "{text}");
        }
    }
}

#[test]
fn forward_only_sessions_are_bit_identical() {
    // Layers with different gates share one set of buffers.
    let mixed = serde_json::json!({"layers": {"0": "gated_softmax", "1": {"heads": {"2": "exp over=length out"}}}});
    for (attention, map) in [("softmax", None), ("gated_softmax_decay", None), ("softmax", Some(mixed))] {
        let mut model = tiny(attention, 2, false);
        if let Some(map) = map {
            let mut config = model.config.clone();
            config.set_attention_json(&map).expect("a map");
            model = Model::fresh(config, 3).expect("a model");
        }
        let (rows, time) = (2, 9);
        let ids = tokens(rows * time, 29, 1);
        let (labels, lengths) = (labels(&ids), [9, 6]);
        let batch = Batch::new(&ids, &labels).lengths(Some(&lengths));
        let mut kept = model.session(rows, time, SessionOptions::default()).expect("a session");
        let mut bare = model.session(rows, time, SessionOptions::default().forward_only(true)).expect("a session");
        for _ in 0..2 {
            let (a, b) = (kept.loss(&model.params, &batch).expect("a loss"), bare.loss(&model.params, &batch).expect("a loss"));
            assert_eq!(a.mean().to_bits(), b.mean().to_bits(), "{attention}");
            assert_eq!(kept.token_losses(), bare.token_losses());
        }
        let mut seen = Vec::new();
        let mut observe = |session: &mut termwise_model::Session| {
            let mut outputs = Vec::new();
            session
                .observe(&model.params, &ids, Some(&lengths), &mut |observed| {
                    assert_eq!((observed.shape.batch, observed.shape.time), (rows, time));
                    outputs.push((observed.layer, observed.inputs.q().values().to_vec(), observed.y.to_vec()));
                })
                .expect("a pass");
            let mut logits = vec![0.0; ids.len() * 29];
            session.logits(&model.params, 0..ids.len(), &mut logits).expect("logits");
            seen.push((outputs, logits));
        };
        observe(&mut kept);
        observe(&mut bare);
        assert_eq!(seen[0].0.iter().map(|(layer, ..)| *layer).collect::<Vec<_>>(), [0, 1]);
        assert!(seen[0] == seen[1], "{attention}");
        let mut grads = model.params.zeros_like().expect("memory");
        let error = bare.loss_and_grad(&model.params, &batch, &mut grads).expect_err("nothing is kept");
        assert!(error.to_string().contains("forward_only"), "{error}");
        assert!(grads.values().iter().all(|&g| g == 0.0));
    }
}

#[test]
fn invalid_ranges_and_sizes_are_errors() {
    let model = tiny("softmax", 4, false);
    let mut session = model.session(2, 4, SessionOptions::default()).expect("a session");
    session.run(&model.params, &tokens(8, 29, 1), None).expect("a run");
    let mut logits = vec![0.0; 2 * 29];
    session.logits(&model.params, 6..8, &mut logits).expect("the last rows");
    #[allow(clippy::reversed_empty_ranges, reason = "the invalid range under test")]
    for rows in [10..12, 7..9, 8..10, 5..3, usize::MAX - 1..usize::MAX] {
        let error = session.logits(&model.params, rows.clone(), &mut logits).expect_err("refused").to_string();
        assert!(error.contains(&format!("{}..{}", rows.start, rows.end)) && error.contains('8'), "{error}");
    }
    assert!(session.logits(&model.params, 6..8, &mut logits[1..]).is_err());
    let other = tiny("softmax", 2, false);
    assert!(session.logits(&other.params, 6..8, &mut logits).is_err() && session.run(&other.params, &[0; 8], None).is_err());
    for (batch, time) in [(0, 1), (1, 0), (1 << 40, 1 << 40), (usize::MAX, 1), (1 << 31, 2)] {
        assert!(model.session(batch, time, SessionOptions::default()).is_err(), "{batch} {time}");
    }
}

#[test]
fn a_configuration_changed_after_allocation_is_rejected() {
    let changes: [fn(&mut termwise_model::Config); 5] = [
        |config| config.hidden_size = 48,
        |config| config.num_hidden_layers = 1,
        |config| config.num_hidden_layers = 3,
        |config| config.tie_word_embeddings = true,
        |config| config.attention = "gated_softmax".parse::<termwise_attention::Variant>().expect("a variant").into(),
    ];
    for change in changes {
        let mut model = tiny("softmax", 4, false);
        change(&mut model.config);
        assert!(model.session(1, 4, SessionOptions::default()).is_err(), "{:?}", model.config);
        assert!(termwise_model::decode::Decoder::new(model, Default::default()).is_err());
    }
}

#[test]
fn oversized_configurations_are_rejected_before_allocation() {
    let text = |vocabulary: u64, layers: usize| {
        format!(
            r#"{{"vocab_size": {vocabulary}, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": {layers},
                "num_attention_heads": 4}}"#
        )
    };
    // Too many to address, and addressable but larger than any machine: 72 PB.
    assert!(termwise_model::Config::from_json_str(&text(u64::MAX / 2, 2), "huge").is_err());
    let config = termwise_model::Config::from_json_str(&text(1 << 48, 2), "large").expect("addressable");
    let error = Model::zeros(config.clone()).expect_err("no such machine").to_string();
    assert!(error.contains("memory"), "{error}");
    // Products of sizes are also checked if a family stores two matrices as one.
    for key in ["intermediate_size", "vocab_size", "hidden_size", "head_dim"] {
        let mut json = serde_json::json!({"model_type": "phi3", "vocab_size": 29, "hidden_size": 64, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4});
        termwise_model::Config::from_json_str(&json.to_string(), "phi3").expect("valid");
        json[key] = serde_json::json!(u64::MAX - 1);
        assert!(termwise_model::Config::from_json_str(&json.to_string(), "phi3").is_err(), "{key}");
    }
    // A file with other shapes is rejected without an allocation.
    let folder = tempfile::tempdir().expect("a folder");
    let small = Model::fresh(termwise_model::Config::from_json_str(&text(29, 1), "small").expect("valid"), 1).expect("a model");
    small.write(folder.path(), &Default::default()).expect("written");
    Model { config: termwise_model::Config { num_hidden_layers: 1, ..config }, ..small }.config.write(folder.path()).expect("written");
    let error = Model::read(folder.path()).expect_err("other shapes").to_string();
    assert!(error.contains("model.embed_tokens.weight") && error.contains("[29, 64]"), "{error}");
}

#[test]
fn logits_need_the_output_of_a_forward_pass() {
    let model = tiny("softmax", 2, true);
    let ids = tokens(8, 29, 1);
    let labels = labels(&ids);
    let expected = common::logits(&model, &ids, None, 1, AttentionEngine::Fused);
    let mut session = model.session(1, 8, SessionOptions::default()).expect("a session");
    let mut found = vec![0.0; 8 * 29];
    let mut logits = |session: &mut Session| session.logits(&model.params, 0..8, &mut found).map(|()| found.clone());
    assert!(matches!(logits(&mut session), Err(Error::NoOutput)), "nothing has run");
    session.loss(&model.params, &Batch::new(&ids, &labels)).expect("a loss");
    assert_eq!(logits(&mut session).expect("after a loss"), expected);
    let mut grads = model.params.zeros_like().expect("memory");
    session.loss_and_grad(&model.params, &Batch::new(&ids, &labels), &mut grads).expect("gradients");
    assert!(matches!(logits(&mut session), Err(Error::NoOutput)), "overwritten by a backward pass");
    session.run(&model.params, &ids, None).expect("a run");
    assert_eq!(logits(&mut session).expect("after a run"), expected);
    assert!(session.run(&model.params, &[29; 8], None).is_err());
    assert_eq!(logits(&mut session).expect("nothing ran"), expected);
}

/// The loss and the gradient of a batch in this precision, after one on other parameters.
fn in_precision(model: &Model, batch: &Batch, rows: usize, precision: Precision) -> (Loss, Params) {
    let options = SessionOptions::default().precision(precision);
    let mut session = model.session(rows, batch.ids.len() / rows, options).expect("a session");
    let mut other = model.params.clone();
    other.values_mut().iter_mut().for_each(|w| *w *= 0.5);
    let mut grads = model.params.zeros_like().expect("room");
    session.loss_and_grad(&other, batch, &mut grads).expect("a loss");
    grads.set_zero();
    let loss = session.loss_and_grad(&model.params, batch, &mut grads).expect("a loss");
    let again = session.loss(&model.params, batch).expect("a loss");
    assert_eq!(loss.sum, again.sum, "training and evaluation have the same loss");
    (loss, grads)
}

/// The rounding error of bfloat16 is 2⁻⁹ per value: losses and gradients differ by that order, and by no more.
#[test]
fn bf16_gradients_are_those_of_f32_up_to_rounding() {
    let (rows, time) = (3, 20);
    let ids = tokens(rows * time, 29, 1);
    let labels = labels(&ids);
    let batch = Batch::new(&ids, &labels);
    for attention in VARIANTS {
        let model = tiny(attention, 2, false);
        let (loss, grads) = in_precision(&model, &batch, rows, Precision::F32);
        let (rounded, rounded_grads) = in_precision(&model, &batch, rows, Precision::Bf16);
        assert!(loss.sum != rounded.sum && (loss.mean() - rounded.mean()).abs() < 5e-3 * loss.mean(), "{attention}: {loss:?} {rounded:?}");
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| (x as f64).powi(2)).sum::<f64>().sqrt();
        let pairs = || grads.values().iter().zip(rounded_grads.values());
        let error = norm(&mut pairs().map(|(a, b)| a - b)) / norm(&mut grads.values().iter().copied());
        // gated_softmax_cumgate has an error of 6.5 %. A wrong product has an error near 1.
        assert!(error > 1e-5 && error < 0.1, "{attention}: relative error {error}");
    }
}
