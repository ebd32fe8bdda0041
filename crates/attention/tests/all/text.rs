//! Variant strings: printing and parsing are inverse, and errors are helpful.

use proptest::prelude::*;
use termwise_attention::parts::gate::{InGate, OutGate, PostGate};
use termwise_attention::presets;
use termwise_attention::variant::string::KEYS;
use termwise_attention::{Decay, Denominator, Error, Kernel, Norm, QkNorm, TextError, Variant};

fn parse(text: &str) -> Variant {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn error(text: &str) -> TextError {
    match text.parse::<Variant>() {
        Err(Error::Text(error)) => error,
        other => panic!("{text}: expected an error in the text, found {other:?}"),
    }
}

/// Words and fragments of variant strings, so random strings are nearly valid.
fn fragment() -> impl Strategy<Value = String> {
    let keys = KEYS.iter().map(|key| key.word.to_string());
    let parts = KEYS
        .iter()
        .flat_map(|key| key.parts)
        .chain(Kernel::PARTS)
        .flat_map(|info| info.examples.iter().map(|e| e.to_string()).chain([info.word.to_string()]));
    let names = presets::all().iter().map(|preset| preset.name.to_string());
    let rest = [
        "=", " ", "+", ",", "..", "{", "}", "(", ")", ":", "off", "0", "1e+5", "-3.5", "coef=", "learned", "floor=", "é", "∞", "\u{0}",
        "==",
    ]
    .map(String::from);
    prop::sample::select(keys.chain(parts).chain(names).chain(rest).collect::<Vec<_>>())
}

/// A valid variant string with its words in any order.
fn variant_text() -> impl Strategy<Value = String> {
    let kernel = prop_oneof![
        Just("exp".to_string()),
        (0usize..80, 0usize..70).prop_map(|(first, more)| format!("taylor={first}..{}", first + more)),
        prop::collection::btree_set(0usize..=150, 1..6)
            .prop_map(|orders| format!("taylor={}", orders.iter().map(usize::to_string).collect::<Vec<_>>().join(","))),
        prop::collection::vec(-1e3f64..1e3, 1..5).prop_map(|a| format!(
            "taylor=0..{},coef={}",
            a.len() - 1,
            a.iter().map(|a| format!("{a:?}")).collect::<Vec<_>>().join(":")
        )),
        Just("taylor=0..5,coef=learned".to_string()),
        (0u32..=150).prop_map(|p| format!("power={p}")),
        prop::sample::select(vec!["elu", "relu", "l2", "identity", "hedgehog"]).prop_map(|map| format!("feature={map}")),
    ];
    let number = prop_oneof![any::<f64>().prop_filter("finite", |x| x.is_finite()), -10.0..10.0f64];
    let positive = prop_oneof![1e-300..1e300f64, 1e-3..10.0f64];
    let over = prop_oneof![
        (prop::option::of(positive.clone()), prop::option::of(positive.clone()), any::<bool>(), any::<bool>()).prop_map(
            |(floor, eps, detached, sink)| {
                let mut text = "over=sum".to_string();
                text.extend(floor.map(|x| format!(",floor={x:?}")));
                text.extend(eps.map(|x| format!(",eps={x:?}")));
                text.push_str(if detached {
                    ",detached"
                } else if sink {
                    ",sink"
                } else {
                    ""
                });
                text
            }
        ),
        prop::sample::select(vec!["over=length", "over=none", "over=position"]).prop_map(String::from),
    ];
    let gates = prop::sample::select(vec![
        "",
        "in",
        "out",
        "post",
        "in out",
        "out=cumulative post=out",
        "in out post",
        "out post=out",
        "post=silu",
        "in post=silu,channel",
        "post=sigmoid,channel",
    ]);
    let decays = [
        "",
        "linear",
        "softplus",
        "softplus,channel",
        "sigmoid",
        "sigmoid,16",
        "sigmoid,0.5,channel",
        "mamba",
        "mamba,channel",
        "fixed",
        "given",
    ];
    let decay =
        prop::sample::select(decays.to_vec()).prop_map(|word| if word.is_empty() { String::new() } else { format!("decay={word}") });
    let far_kernel = prop::sample::select(vec!["exp", "taylor=0..2", "taylor=0,3", "power=2", "feature=hedgehog", "taylor=1,coef=learned"]);
    let far = (far_kernel, prop::option::of(1usize..9), prop::option::of(positive.clone())).prop_map(|(kernel, dim, cap)| {
        let mut words = vec![kernel.to_string()];
        words.extend(dim.map(|n| format!("dim={n}")));
        words.extend(cap.map(|c| format!("cap={c:?}")));
        format!("far({})", words.join("+"))
    });
    let classes = prop_oneof![
        3 => Just(String::new()),
        1 => (1usize..5000).prop_map(|w| format!("window={w}")),
        1 => (1usize..5000, 1usize..9).prop_map(|(w, s)| format!("window={w} sinks={s}")),
        1 => (1usize..5000, 1usize..9, far.clone()).prop_map(|(w, s, far)| format!("window={w} sinks={s} {far}")),
        1 => (1usize..5000, far).prop_map(|(w, far)| format!("{far} window={w}")),
        1 => (0.01f64..2.0, -3.0f64..3.0).prop_map(|(r, x)| format!("write=delta,{r:?},scale={x:?}")),
    ];
    let more = (
        classes,
        prop::option::of(positive),
        prop::option::of(1usize..9),
        prop::sample::select(vec!["", "qk_norm=l2", "qk_norm=rms", "qk_norm=rms,all", "qk_norm=rms,all,eps=1e-5"]),
    );
    let rest = (
        decay,
        prop::sample::select(vec!["", "norm=l2", "norm=scaled_l2", "norm=rms", "norm=layer", "norm=none"]),
        prop::sample::select(vec!["", "rope=on", "rope=off"]),
        prop::option::of(1usize..=64),
    );
    let words = (kernel, prop::option::of(number.clone()), prop::option::of(number), over, gates, rest, more, any::<bool>()).prop_map(
        |(kernel, clamp, scale, over, gates, (decay, norm, rope, conv), (classes, cap, dim, qk_norm), reversed)| {
            let mut words = vec![kernel, over, decay, norm.into(), rope.into(), qk_norm.into()];
            words.extend(gates.split(' ').chain(classes.split(' ')).map(String::from));
            words.extend(cap.map(|c| format!("cap={c:?}")));
            words.extend(dim.map(|n| format!("dim={n}")));
            words.extend(clamp.map(|c| format!("clamp={c:?}")));
            words.extend(scale.map(|c| format!("scale={c:?}")));
            words.extend(conv.map(|w| format!("conv={w}")));
            if reversed {
                words.reverse();
            }
            words.join(" ")
        },
    );
    // Invalid combinations have a separate test.
    words.prop_filter("possible", |text| !matches!(text.parse::<Variant>(), Err(Error::Combination { .. })))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, max_global_rejects: 100_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn printing_and_parsing_are_inverse(text in variant_text()) {
        let variant = parse(&text);
        let printed = variant.to_string();
        prop_assert_eq!(&parse(&printed), &variant, "{} printed as {}", text, printed);
        prop_assert_eq!(parse(&printed).to_string(), printed);
        // Other descriptions of a variant must not panic either.
        prop_assert!(!variant.formula().is_empty());
        prop_assert_eq!(variant.canonical().canonical(), variant.canonical());
        variant.warnings();
        variant.state_size(64, 64);
    }

    #[test]
    fn separators_and_brackets_are_interchangeable(text in variant_text()) {
        let variant = parse(&text);
        let words: Vec<&str> = text.split_whitespace().collect();
        prop_assert_eq!(&parse(&words.join("  ")), &variant);
        prop_assert_eq!(&parse(&words.join("+")), &variant);
        for (open, close) in [('{', '}'), ('(', ')')] {
            let bracketed = |word: &&str| match word.split_once('=') {
                Some((key, value)) if !key.contains('(') => format!("{key}{open}{value}{close}"),
                _ => word.to_string(),
            };
            prop_assert_eq!(&parse(&words.iter().map(bracketed).collect::<Vec<_>>().join(" ")), &variant);
        }
    }

    #[test]
    fn parsing_never_panics_and_errors_have_valid_positions(text in prop_oneof![any::<String>(), prop::collection::vec(fragment(), 0..8).prop_map(|parts| parts.concat())]) {
        match text.parse::<Variant>() {
            Ok(variant) => prop_assert_eq!(parse(&variant.to_string()), variant),
            Err(Error::Text(error)) => {
                prop_assert_eq!(&error.text, &text);
                prop_assert!(text.get(error.span.clone()).is_some(), "{:?} of {:?}", error.span, text);
                prop_assert!(!error.problem.is_empty() && error.to_string().contains('^'));
            }
            Err(other) => prop_assert!(!other.to_string().is_empty()),
        }
    }
}

#[test]
fn every_example_of_every_part_parses() {
    for info in Kernel::PARTS {
        for example in info.examples {
            let text = if example.is_empty() { info.word.to_string() } else { format!("{}={example}", info.word) };
            assert_eq!(parse(&text).near.kernel.info().word, info.word, "{text}");
        }
    }
    for key in KEYS {
        for example in key.parts.iter().flat_map(|info| info.examples) {
            // `post=out` requires an output gate, and a write rule has no sum denominator.
            let gate = match (key.word, *example) {
                ("post", "out") => " out",
                ("write", _) => " over=none",
                _ => "",
            };
            let text = format!("{}={example}{gate}", key.word);
            assert_eq!(parse(&parse(&text).to_string()), parse(&text), "{text}");
        }
        assert!(!key.about.is_empty());
    }
}

#[test]
fn every_part_has_a_unique_word() {
    for slot in
        [Kernel::PARTS, Denominator::PARTS, InGate::PARTS, OutGate::PARTS, PostGate::PARTS, Decay::PARTS, Norm::PARTS, QkNorm::PARTS]
    {
        let mut words: Vec<&str> = slot.iter().map(|info| info.word).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), slot.len());
    }
    // A key that needs a value may share its word with a preset: `norm=l2` and `norm`.
    let mut heads: Vec<&str> =
        KEYS.iter().filter(|key| key.bare.is_some()).map(|key| key.word).chain(Kernel::PARTS.iter().map(|info| info.word)).collect();
    heads.extend(presets::all().iter().map(|preset| preset.name));
    let count = heads.len();
    heads.sort_unstable();
    heads.dedup();
    assert_eq!(heads.len(), count, "a word can have only one meaning");
}

#[test]
fn presets_print_as_their_parts() {
    for preset in presets::all() {
        let variant = parse(preset.name);
        assert_eq!(variant, preset.parts(), "{}", preset.name);
        assert_eq!(parse(&variant.to_string()), variant, "{}", preset.name);
    }
    assert_eq!(parse("gated_softmax norm=rms"), parse("exp clamp=5 over=length in out norm=rms"));
    assert_eq!(parse("norm=rms gated_softmax out=off clamp=off"), parse("exp over=length in norm=rms"));
}

#[test]
fn misspelled_words_get_a_suggestion() {
    for (text, suggestion) in [
        ("sofmax", "softmax"),
        ("softmaxx", "softmax"),
        ("tayler=0..4", "taylor"),
        ("exp ovr=sum", "over"),
        ("exp over=lenght", "over=length"),
        ("exp norm=layr", "norm=layer"),
        ("exp norm=scaledl2", "norm=scaled_l2"),
        ("exp decay=softplu", "decay=softplus"),
        ("exp out=cumulativ", "out=cumulative"),
        ("exp layer", "norm=layer"),
        ("gated_sofmax_decay", "gated_softmax_decay"),
    ] {
        let error = error(text);
        let help = error.help.unwrap_or_else(|| panic!("{text}: no help with `{}`", error.problem));
        assert!(help.contains(suggestion), "{text}: {help}");
    }
}

#[test]
fn a_preset_keeps_its_kernel() {
    for text in ["taylor=0..2 softmax", "softmax taylor=0..2", "gated_softmax norm=rms power=2", "linear_elu feature=relu"] {
        let error = error(text);
        assert!(error.problem.contains("contradicts the preset"), "{text}: {}", error.problem);
        let help = error.help.unwrap_or_default();
        let whole = help.split('`').nth(1).unwrap_or_default();
        assert!(whole.parse::<Variant>().is_ok(), "{text}: {help}");
    }
    assert_eq!(parse("exp softmax"), parse("softmax"));
}

#[test]
fn errors_point_at_the_word() {
    for (text, word) in [
        ("exp over=sum nrm=l2", "nrm=l2"),
        ("exp clamp=x", "clamp=x"),
        ("exp  over=sum+taylor=1", "taylor=1"),
        ("softmax gate", "gate"),
        ("exp over", "over"),
        ("taylor=4..2 over=sum", "taylor=4..2"),
        ("exp over=sum,floor=-1", "over=sum,floor=-1"),
        ("exp rope=maybe", "rope=maybe"),
        ("exp conv=-1", "conv=-1"),
        ("exp clamp=inf", "clamp=inf"),
        ("exp=3", "exp=3"),
        ("power", "power"),
        ("exp over=length,3", "over=length,3"),
        ("exp in in", "in"),
        ("ééé exp", "ééé"),
        ("exp window=4 far(softmax)", "far(softmax)"),
        ("exp window=4 far(dim=2)", "far(dim=2)"),
        ("exp window=4 far(exp window=2)", "far(exp window=2)"),
        ("exp window=4 far(taylor=4..2)", "far(taylor=4..2)"),
        ("exp window=4 far(taylor=0..2 cap=5", "far(taylor=0..2 cap=5"),
        ("exp window=4 far(taylor=0..2)) cap=5", "far(taylor=0..2))"),
        ("exp window=4 far", "far"),
        ("exp window=-1", "window=-1"),
        ("exp cap=0", "cap=0"),
        ("exp write=delta,3", "write=delta,3"),
        ("exp write=delta,0", "write=delta,0"),
        ("exp decay=sigmoid,0", "decay=sigmoid,0"),
        ("exp in=sigmoid,channel", "in=sigmoid,channel"),
    ] {
        let error = error(text);
        assert_eq!(&text[error.span.clone()], word, "{text}: {}", error.problem);
    }
    assert!(error("").to_string().contains("softmax"));
    assert_eq!(error("exp in in").span, 7..9);
}

#[test]
fn invalid_combinations_are_rejected_with_a_reason() {
    for text in [
        "exp post=out",
        "exp conv=0",
        "exp conv=65",
        "gated_softmax_post_out_gate_L2norm_nodivS_noclamp out=off",
        "exp window=0",
        "exp window=4 sinks=0",
        "exp sinks=4",
        "exp far(taylor=0..2)",
        "exp dim=0",
        "exp window=4 far(exp dim=0)",
        "exp over=sum,sink,detached",
        "power=1 write=delta",
        "power=1 write=delta over=none in",
        "power=1 write=delta over=position",
        "power=1 write=delta over=none window=4",
        "exp window=4 far(exp dim=2) decay=sigmoid,channel",
        "exp window=4 far(feature=hedgehog) decay=sigmoid,channel",
    ] {
        match text.parse::<Variant>() {
            Err(Error::Combination { reason, .. }) => assert!(reason.len() > 20, "{text}: {reason}"),
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn the_far_branch_has_its_own_words() {
    let text = "exp window=64 sinks=4 far(taylor=0..2 dim=4) over=sum";
    let variant = parse("softmax sinks=4 window=64 far(dim=4+taylor=0..2)");
    assert_eq!(variant.to_string(), text);
    let far = variant.far.clone().expect("a far kernel");
    assert_eq!((far.dim, far.scale_for(64), variant.near.scale_for(64), far.score_dim(64)), (Some(4), 0.5, 0.125, 4));
    assert_eq!(parse("softmax window=64 far(exp)").canonical(), parse("softmax"));
    assert_ne!(parse("softmax window=64 far(exp scale=1)").canonical(), parse("softmax"));
    assert_eq!(parse("streaming window=off sinks=off"), parse("softmax"));
    assert_eq!(parse("deltanet write=off"), parse("feature=identity over=none qk_norm=l2 norm=rms rope=off conv=4"));
}

#[test]
fn long_forms_of_keys_parse_to_the_same_variant() {
    let read = |text: &str| text.parse::<termwise_attention::Variant>().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(read("exp denominator=length").to_string(), "exp over=length");
    assert_eq!(read("taylor=0..2 denominator(sum,eps=1)"), read("taylor=0..2 over=sum,eps=1"));
    for (long, printed) in [("heavy_hitters=2", "chosen=2"), ("heavy_hitters=2,fade=8", "chosen=2,fade=8"), ("kv_bits=8", "bits=8")] {
        let variant = read(&format!("exp window=4 {long}"));
        assert_eq!(variant, read(&format!("exp window=4 {printed}")));
        assert!(variant.to_string().contains(&format!(" {printed} ")), "{variant}");
    }
    let twice = "exp over=sum denominator=length".parse::<termwise_attention::Variant>();
    assert!(twice.is_err_and(|error| error.to_string().contains("both set the over")));
}

#[test]
fn removed_parts_name_the_last_commit_that_supports_them() {
    for (text, part, word) in [
        ("taylor=0..2 centre=running", "`centre`", "centre=running"),
        ("exp centre=learned,gauss", "`centre`", "centre=learned,gauss"),
        ("exp centre(whole)", "`centre`", "centre(whole)"),
        ("exp window=4 far(taylor=0..2 dim=2 centre=whole,gauss)", "`centre`", "far(taylor=0..2 dim=2 centre=whole,gauss)"),
        ("taylor=0..4,at=-3.5", "`at`", "taylor=0..4,at=-3.5"),
        ("taylor(0..2, at=1, coef=1:2:3) over=sum", "`at`", "taylor(0..2, at=1, coef=1:2:3)"),
        ("exp window=4 far(taylor=0..2,at=1)", "`at`", "far(taylor=0..2,at=1)"),
    ] {
        let error = error(text);
        assert_eq!(&text[error.span.clone()], word, "{text}");
        assert!(error.problem.contains(part) && error.problem.contains("12bd7e8"), "{text}: {}", error.problem);
    }
    assert!(!error("exp centr=4").problem.contains("removed"));
}
