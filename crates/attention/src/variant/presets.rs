//! Presets: published names and their parts.

use std::sync::OnceLock;

use crate::Variant;

/// A name for a combination of parts.
#[derive(Debug)]
#[non_exhaustive]
pub struct Preset {
    /// The name.
    pub name: &'static str,
    /// Its variant string.
    pub text: &'static str,
    /// A note for readers of the paper; empty if there is none.
    pub note: &'static str,
}

impl Preset {
    /// Its parts.
    pub fn parts(&self) -> Variant {
        self.text.parse().expect("presets are valid; a test parses each")
    }
}

const fn preset(name: &'static str, text: &'static str, note: &'static str) -> Preset {
    Preset { name, text, note }
}

/// Every preset, published names first.
pub fn all() -> &'static [Preset] {
    PRESETS
}

/// The preset of this name.
pub fn find(name: &str) -> Option<&'static Preset> {
    static BY_NAME: OnceLock<std::collections::HashMap<&'static str, &'static Preset>> = OnceLock::new();
    BY_NAME.get_or_init(|| PRESETS.iter().map(|preset| (preset.name, preset)).collect()).get(name).copied()
}

#[rustfmt::skip]
static PRESETS: &[Preset] = &[
    preset("softmax", "exp over=sum", "the attention of Llama"),
    preset("softmax_clamp_denom", "exp clamp=5 over=sum,floor=1", ""),
    preset("softmax_detach_denom", "exp clamp=5 over=sum,floor=1,detached", ""),
    preset("softmax_detach_denom_gate", "exp clamp=5 over=sum,eps=1e-4,detached out", ""),
    preset("softmax_divs", "exp clamp=5 over=length", ""),
    preset("gated_softmax_no_gate_no_norm", "exp clamp=5 over=length", ""),
    preset("softmax_gate", "exp clamp=5 over=none out", ""),
    preset("softmax_divS_gate", "exp clamp=5 over=length out", ""),
    preset("softmax_divS_gatev2", "exp clamp=5 over=length out", "the paper's Gate"),
    preset("gated_softmax_no_in_gate_no_norm", "exp clamp=5 over=length out", "the published README calls it equal to softmax_gate; it is softmax_divS_gate"),
    preset("softmax_divS_norm", "exp clamp=5 over=length norm=rms", ""),
    preset("gated_softmax_no_gate_rmsnorm", "exp clamp=5 over=length norm=rms", ""),
    preset("softmax_taylor_80terms", "taylor=0..79 over=sum", "divided by its sum as in the paper; the published code computes that sum and does not divide"),
    preset("gated_softmax", "exp clamp=5 over=length in out norm=layer", ""),
    preset("gated_softmax_no_norm", "exp clamp=5 over=length in out", ""),
    preset("gated_softmax_no_in_gate", "exp clamp=5 over=length out norm=layer", ""),
    preset("gated_softmax_no_out_gate", "exp clamp=5 over=length in norm=layer", ""),
    preset("gated_softmax_no_out_gate_no_norm", "exp clamp=5 over=length in", ""),
    preset("gated_softmax_no_gate", "exp clamp=5 over=length norm=layer", ""),
    preset("gated_softmax_no_gate_rmsnorm_nodivS", "exp clamp=5 over=none norm=rms", ""),
    preset("gated_softmax_no_gate_L2norm_nodivS", "exp clamp=5 over=none norm=l2", ""),
    preset("gated_softmax_no_gate_L2norm_nodivS_noclamp", "exp over=none norm=l2", "the paper's Norm"),
    preset("gated_softmax_out_gate_L2norm_nodivS_noclamp", "exp over=length out norm=l2", ""),
    preset("gated_softmax_post_out_gate_L2norm_nodivS_noclamp", "exp over=length out post=out norm=l2", "one gate before and after the norm"),
    preset("gated_softmax_no_gate_customnorm", "exp clamp=5 over=length norm=scaled_l2", ""),
    preset("gated_relu_no_in_gate_no_norm", "feature=relu clamp=5 over=length out", ""),
    preset("gated_ReLU_no_gate_L2norm_nodivS_noclamp", "feature=relu over=none norm=l2", ""),
    preset("gated_softmax_cumgate", "exp clamp=5 over=none out=cumulative", ""),
    preset("gated_softmax_decay", "exp clamp=5 over=length in out decay=linear norm=layer rope=off", ""),
    preset("linear_elu", "feature=elu scale=1 over=sum", "linear attention"),
    preset("linear_relu", "feature=relu scale=1 over=sum,eps=1e-8", ""),
    preset("linear_cosine", "feature=l2 scale=1 over=position", "normalized over the head dimension as in the paper; the published code normalizes over heads"),
    preset("norm", "exp over=none norm=l2", "short for the paper's Norm"),
    preset("gate", "exp clamp=5 over=length out", "short for the paper's Gate"),
    preset("linear", "feature=identity over=none norm=rms", "order 1 alone, with a norm"),
    preset("sliding_window", "exp window=4096 over=sum", "Mistral 7B (arXiv 2310.06825): softmax over the last 4,096 keys"),
    preset("streaming", "exp window=1020 sinks=4 over=sum", "StreamingLLM (arXiv 2309.17453): the first 4 keys and the last 1,020"),
    preset("sink", "exp over=sum,sink", "gpt-oss (arXiv 2508.10925): softmax with a learned exp(b) in the denominator"),
    preset("qwen_gated", "exp over=sum post=sigmoid,channel", "gated attention (arXiv 2505.06708): softmax, each value of the output through a sigmoid gate"),
    preset("based", "taylor=0..2 dim=16 over=sum,eps=1e-6 rope=off", "the linear layers of Based (arXiv 2402.18668); alternating with layers of `sliding_window window=64`"),
    preset("retnet", "feature=identity over=none post=silu,channel decay=fixed norm=rms", "RetNet (arXiv 2307.08621): fixed decays, group norm, a SiLU gate; RoPE instead of xPos"),
    preset("forgetting", "exp over=sum decay=sigmoid rope=off", "Forgetting Transformer (arXiv 2503.02130): softmax with a forget gate"),
    preset("gla", "feature=identity over=none post=silu,channel decay=sigmoid,16,channel norm=rms rope=off", "gated linear attention (arXiv 2312.06635): a forget gate per channel"),
    preset("mamba2", "feature=identity scale=1 over=none post=silu,channel decay=mamba norm=rms rope=off conv=4", "the attention form of Mamba-2 (arXiv 2405.21060), without its step size on v, its skip D, and with the norm before the gate"),
    preset("power_gated", "power=2 over=sum,eps=1e-6 decay=sigmoid rope=off", "power attention with a forget gate (arXiv 2507.04239)"),
    preset("2mamba", "power=2 over=none decay=softplus norm=rms rope=off conv=4", "2Mamba (arXiv 2602.17363): order 2, softplus decay, short convolution; a norm instead of the sum"),
    preset("deltanet", "feature=identity write=delta over=none qk_norm=l2 norm=rms rope=off conv=4", "DeltaNet (arXiv 2406.06484): order 1 with the delta rule"),
    preset("gated_deltanet", "feature=identity write=delta over=none post=silu,channel decay=mamba qk_norm=l2 norm=rms rope=off conv=4", "Gated DeltaNet (arXiv 2412.06464): the delta rule with a decay"),
    preset("kda", "feature=identity write=delta over=none post=sigmoid,channel decay=mamba,channel qk_norm=l2 norm=rms rope=off conv=4", "Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay per channel"),
    preset("delta_order1", "power=1 write=delta over=none qk_norm=l2 norm=rms rope=off", "the delta rule on order 1; unit keys keep it stable for β up to 2"),
    preset("delta_order2", "power=2 write=delta over=none qk_norm=l2 norm=rms rope=off", "the delta rule on order 2 (termwise); the state has one row per pair of channels"),
    preset("delta_order3", "power=3 write=delta over=none qk_norm=l2 norm=rms rope=off", "the delta rule on order 3 (termwise)"),
    preset("delta_taylor2", "taylor=0..2 write=delta,scale=0.5 over=none qk_norm=l2 norm=rms rope=off", "the delta rule on orders 0 to 2 (termwise); at scale ½, w(k·k) = 1.625 < 2/β"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_valid_and_found_by_its_name() {
        for preset in all() {
            assert_eq!(preset.parts().validate(), Ok(()), "{}", preset.name);
            assert_eq!(find(preset.name).map(|found| found.text), Some(preset.text), "two presets are called {}", preset.name);
            assert_eq!(preset.parts().to_string().parse(), Ok(preset.parts()), "{}", preset.name);
        }
        assert!(find("sofmax").is_none());
    }

    #[test]
    fn preset_strings_are_in_printed_form() {
        for preset in all() {
            let words =
                |text: &str| text.split(' ').map(|word| word.trim_end_matches(".0").to_string()).collect::<std::collections::BTreeSet<_>>();
            let printed = preset.parts().to_string().replace(".0 ", " ").replace(".0,", ",");
            assert_eq!(words(&printed), words(preset.text), "{}", preset.name);
        }
    }

    #[test]
    fn all_published_names_are_presets() {
        // Published names that differ only in name.
        for (a, b) in [
            ("softmax_divs", "gated_softmax_no_gate_no_norm"),
            ("softmax_divS_gate", "softmax_divS_gatev2"),
            ("softmax_divS_gate", "gated_softmax_no_in_gate_no_norm"),
            ("softmax_divS_norm", "gated_softmax_no_gate_rmsnorm"),
            ("norm", "gated_softmax_no_gate_L2norm_nodivS_noclamp"),
            ("gate", "softmax_divS_gatev2"),
        ] {
            assert_eq!(find(a).map(Preset::parts), find(b).map(Preset::parts), "{a} and {b}");
        }
        let table = all().iter().position(|preset| preset.name == "norm");
        assert_eq!(table, Some(32), "the published table comes first");
        for name in [
            "sliding_window",
            "streaming",
            "sink",
            "qwen_gated",
            "based",
            "retnet",
            "forgetting",
            "gla",
            "mamba2",
            "power_gated",
            "2mamba",
            "deltanet",
            "gated_deltanet",
            "kda",
            "delta_order1",
            "delta_order2",
            "delta_order3",
            "delta_taylor2",
        ] {
            let preset = find(name).unwrap_or_else(|| panic!("no preset {name}"));
            assert!(preset.note.contains("arXiv") || preset.note.contains("new") || name.starts_with("delta_"), "{name} is not cited");
        }
    }
}
