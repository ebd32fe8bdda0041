//! The converted model: the original's weights, with the variants of its kv heads and the tensors that these read.

use std::borrow::Cow;

use termwise_attention::{Extra, Variant};
use termwise_llama::config::AttentionMap;
use termwise_llama::{Config, Model};

use crate::Error;
use crate::fit::Fits;
use crate::kinds::{Far, Kind};

/// One kind for each kv head, by layer and kv head.
pub type Choice = Vec<Kind>;

/// The attention of a model whose kv heads have these memories; `None` leaves a head as it is.
pub fn attention(config: &Config, fits: &Fits, kinds: &[Option<Kind>]) -> Result<AttentionMap, Error> {
    let (g, group) = (config.num_key_value_heads, config.num_attention_heads / config.num_key_value_heads);
    let mut map = config.attention.clone();
    for (index, kind) in kinds.iter().enumerate() {
        let (layer, kv_head) = (index / g, index % g);
        let own: Vec<Variant> = config.heads(layer);
        let Some(kind) = kind else { continue };
        for (head, own) in own.iter().enumerate().skip(kv_head * group).take(group) {
            map.set_head(layer, head, fits.variant(kind, own, layer, head)?);
        }
    }
    Ok(map)
}

impl Fits {
    /// The attention of a head with this memory: what [`Kind::variant`] says, and the size of learned features, which is no tensor.
    pub fn variant(&self, kind: &Kind, own: &Variant, layer: usize, head: usize) -> Result<Variant, Error> {
        let mut variant = kind.variant(own)?;
        if let (Far::Hedgehog, Some(far), Some(rival)) = (kind.far, &mut variant.far, self.rival(kind)) {
            far.scale = rival.layers.get(layer).and_then(|layer| layer.size.get(head)).copied().map(f64::from);
        }
        Ok(variant)
    }

    /// The values of a tensor that conversion added to a layer whose far keys are kept like this.
    pub fn tensor(&self, layer: usize, extra: Extra, kind: &Kind) -> Option<Cow<'_, [f32]>> {
        let own = self.layers.get(layer)?;
        let d = own.k_dim.len() / own.code_centre.len();
        let (dim, group) = (kind.far_dim(d), own.gamma.len() * d / own.code_centre.len());
        let rival = || self.rival(kind)?.layers.get(layer);
        let rows = |matrix: &[f32], times: usize| -> Vec<f32> {
            matrix.chunks_exact(d * d).flat_map(|own| std::iter::repeat_n(&own[..dim * d], times)).flatten().copied().collect()
        };
        Some(match extra {
            Extra::FarDimQ | Extra::DimQ => rows(&own.q_dim, group).into(),
            Extra::FarDimK | Extra::DimK => rows(&own.k_dim, 1).into(),
            Extra::FarSpread => {
                let mut left = own.spread.clone();
                for (left, q) in left.chunks_exact_mut(d * d).zip(own.q_dim.chunks_exact(d * d)) {
                    for row in q.chunks_exact(d).take(dim) {
                        left.chunks_exact_mut(d).zip(row).for_each(|(to, x)| to.iter_mut().zip(row).for_each(|(to, y)| *to -= x * y));
                    }
                }
                left.into()
            }
            Extra::FarGamma => match kind.far {
                Far::Mean => (&own.mean_gamma).into(),
                Far::Polynomial => (&rival()?.gamma).into(),
                _ => (&own.gamma).into(),
            },
            Extra::FarCoefficients => match kind.far {
                Far::Mean => (&own.mean_coefficient).into(),
                Far::Polynomial => (&rival()?.coefficients).into(),
                _ => (&own.coefficients).into(),
            },
            Extra::FarFeatureQ => (&rival()?.q_feature).into(),
            Extra::FarFeatureQBias => (&rival()?.q_bias).into(),
            Extra::FarFeatureK => (&rival()?.k_feature).into(),
            Extra::FarFeatureKBias => (&rival()?.k_bias).into(),
            Extra::CodeCentre => (&own.code_centre).into(),
            Extra::CodeRange => (&own.code_range).into(),
            _ => return None,
        })
    }
}

/// The kind that says how the far keys of a layer are kept, on which its heads agree.
pub(crate) fn far_kind<'a>(kinds: impl Iterator<Item = &'a Kind>) -> Kind {
    let mut first = None;
    for kind in kinds {
        if kind.far != Far::None {
            return *kind;
        }
        first = first.or(Some(*kind));
    }
    first.unwrap_or_default()
}

/// A converted model that becomes the next one where only variants and small tensors differ: weights are copied once for each layout.
#[derive(Default)]
pub struct Bench {
    model: Option<Model>,
}

impl Bench {
    /// The model with these memories.
    pub fn assemble(&mut self, model: &Model, fits: &Fits, kinds: &[Option<Kind>]) -> Result<&Model, Error> {
        let mut config = model.config.clone();
        config.set_attention(attention(&model.config, fits, kinds)?)?;
        let same = |known: &Model| -> Result<bool, Error> {
            let list = config.parameter_list()?;
            let entries = known.params.layout().entries();
            Ok(list.len() == entries.len() && list.iter().zip(entries).all(|(spec, entry)| *spec == entry.spec))
        };
        let (mut converted, fresh) = match self.model.take() {
            Some(known) if same(&known)? => (Model { config, ..known }, false),
            _ => (Model::zeros(config)?, true),
        };
        let g = converted.config.num_key_value_heads;
        let layout = converted.params.layout().clone();
        let layers = converted.config.attention_layers(1)?;
        for entry in layout.entries() {
            let to = &mut converted.params.values_mut()[entry.range()];
            if let Ok(own) = model.params.get(&entry.spec.name) {
                if fresh {
                    to.copy_from_slice(own);
                }
                continue;
            }
            let place = entry.spec.name.split_once("layers.").and_then(|(_, rest)| rest.split_once('.'));
            let layer = place.and_then(|(number, rest)| Some((number.parse::<usize>().ok()?, rest.strip_prefix("self_attn.")?)));
            let found = layer.and_then(|(layer, name)| {
                let kind = far_kind(kinds[layer * g..(layer + 1) * g].iter().flatten());
                let spec = layers[layer].extras().iter().find(|spec| spec.name == name)?;
                fits.tensor(layer, spec.extra, &kind)
            });
            match found.filter(|values| values.len() == to.len()) {
                Some(values) => to.copy_from_slice(&values),
                None => {
                    return Err(Error::Asked(format!(
                        "`{}` was not calibrated; this is a kind of memory that needs more than that",
                        entry.spec.name
                    )));
                }
            }
        }
        Ok(self.model.insert(converted))
    }
}

/// The model with these memories.
pub fn assemble(model: &Model, fits: &Fits, kinds: &[Option<Kind>]) -> Result<Model, Error> {
    let mut bench = Bench::default();
    bench.assemble(model, fits, kinds)?;
    bench.model.ok_or_else(|| Error::Asked("there is no model".into()))
}
