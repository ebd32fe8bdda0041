//! Catalogue of presets and parts: descriptions, added parameters, states, and equalities.
//!
//! ```
//! use termwise_analysis::variants::{Sizes, describe};
//!
//! let found = &describe(&["taylor=0..2"], Sizes::default())?[0];
//! assert_eq!(found.expression, "taylor=0..2 over=sum");
//! assert_eq!(found.state.floats(), Some(139_425));
//! # Ok::<(), termwise_analysis::Error>(())
//! ```

mod classes;
mod combinations;
mod describe;
mod document;
mod list;
mod parts;

pub use classes::{Class, Equal, Relation, label};
pub use combinations::combinations;
pub use describe::{Added, Description, Sizes, State, describe};
pub use list::split_list;
pub use parts::{PartInfo, Slot, slots};

use serde::{Deserialize, Serialize};
use termwise_attention::presets;

use crate::Error;

/// The general formula.
pub const FORMULA: &str = "\
y_t = P_t ⊙ N( O_t · (1/D_t) · Σ_{s visible from t} M_ts · w(x_ts) · I_s · u_s )
x_ts = cap(scale · q_t·k_s),  u_t = v_t or β_t·(v_t − Σ_{s<t} M_ts·w(k_t·k_s)·u_s)";

/// Requested variants.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Described {
    /// The sizes for which parameters and states are counted.
    pub sizes: Sizes,
    /// Each compared with all presets and with the others.
    pub variants: Vec<Description>,
}

/// All presets and parts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Catalogue {
    /// The general formula.
    pub formula: String,
    /// The sizes for which parameters and states are counted.
    pub sizes: Sizes,
    /// Every preset, published names first.
    pub presets: Vec<Description>,
    /// Presets with equal outputs, in the order of their first member.
    pub classes: Vec<Class>,
    /// The slots of the formula with their parts.
    pub slots: Vec<Slot>,
}

/// All presets and parts, counted for these sizes.
pub fn catalogue(sizes: Sizes) -> Result<Catalogue, Error> {
    let names: Vec<&str> = presets::all().iter().map(|preset| preset.name).collect();
    Ok(Catalogue { formula: FORMULA.into(), sizes, presets: describe(&names, sizes)?, classes: classes::of_presets(), slots: slots() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_in_one_class_and_has_a_description() {
        let all = catalogue(Sizes::default()).expect("presets are possible");
        assert_eq!(all.presets.len(), presets::all().len());
        let members: usize = all.classes.iter().map(|class| class.members.len()).sum();
        assert_eq!(members, all.presets.len());
        for preset in &all.presets {
            let class = all.classes.iter().find(|class| Some(&class.label) == preset.class.as_ref()).expect("a class");
            assert!(class.members.contains(preset.name.as_ref().expect("a name")));
            assert_eq!(class.members.len() - 1, preset.equal_to.len(), "{:?}", preset.name);
        }
    }

    #[test]
    fn aliases_share_a_class_and_norms_merge_classes() {
        let all = catalogue(Sizes::default()).expect("presets are possible");
        let find = |name: &str| all.presets.iter().find(|preset| preset.name.as_deref() == Some(name)).expect("a preset");
        let relation = |a: &str, b: &str| find(a).equal_to.iter().find(|equal| equal.name == b).map(|equal| equal.relation);
        assert_eq!(relation("softmax_divs", "gated_softmax_no_gate_no_norm"), Some(Relation::Identical));
        assert_eq!(relation("norm", "gated_softmax_out_gate_L2norm_nodivS_noclamp"), Some(Relation::UpToEps));
        assert_eq!(relation("softmax", "norm"), None);
        assert_eq!(relation("norm", "gated_softmax_post_out_gate_L2norm_nodivS_noclamp"), None);
    }

    #[test]
    fn parameters_are_counted_for_the_sizes() {
        let sizes = Sizes { heads: 4, kv_heads: 2, head_dim: 8, hidden: 32 };
        let [gated, plain, state] = &describe(&["gated_softmax", "softmax", "taylor=0..2 over=none"], sizes).expect("possible")[..] else {
            panic!("three descriptions")
        };
        let names: Vec<&str> = gated.added.iter().map(|added| added.name.as_str()).collect();
        assert_eq!(
            names,
            ["in_gate_proj.weight", "in_gate_proj.bias", "out_gate_proj.weight", "out_gate_proj.bias", "out_norm.weight", "out_norm.bias"]
        );
        assert_eq!(gated.added_count, 2 * 32 + 2 + 4 * 32 + 4 + 8 + 8);
        assert_eq!((plain.added_count, &plain.state), (0, &State::KvCache));
        assert_eq!(state.state, State::Recurrent { floats: 45 * 8, bytes: Some(4 * 45 * 16), break_even_tokens: 30 });
    }

    #[test]
    fn windows_are_counted_by_their_memory() {
        let [window, far, delta] =
            &describe(&["softmax window=64", "softmax window=64 far(taylor=0..1)", "deltanet"], Sizes::default()).expect("possible")[..]
        else {
            unreachable!("three")
        };
        let State::Recurrent { floats, bytes, break_even_tokens } = window.state else { panic!("{:?}", window.state) };
        assert_eq!((floats, break_even_tokens), (64 * 2 * 64, 64));
        assert!(bytes.is_some_and(|bytes| bytes >= 4 * floats && bytes < 5 * floats), "{bytes:?}");
        assert!(matches!(far.state, State::Recurrent { floats, bytes: Some(_), .. } if floats == 64 * 2 * 64 + 65 * 65));
        assert!(delta.formula.contains("u_t = β_t·(v_t − "), "{}", delta.formula);
    }

    #[test]
    fn requested_variants_are_compared() {
        let found = describe(&["exp over=sum norm=l2", "exp over=length norm=l2", "softmax"], Sizes::default()).expect("possible");
        assert!(found[0].equal_to.iter().any(|equal| equal.name == "exp over=length norm=l2" && equal.relation == Relation::UpToEps));
        assert!(found[0].equal_to.iter().any(|equal| equal.name == "norm"));
        assert!(found[2].equal_to.is_empty());
    }
}
