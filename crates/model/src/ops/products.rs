//! The products of linear layers in the precision of a session: y = x Wᵀ, dx = dy W and dW += dyᵀ x, for x [M, C], W [N, C] and y [M, N].
//!
//! In bfloat16, both operands of a product are rounded and sums are float32, as in PyTorch's autocast. Weights are rounded and packed once per change of
//! the parameters. Parameters, gradients, norms and the loss stay in float32. Attention rounds the operands of its own products, see
//! [`termwise_attention::FusedOptions::bf16`].

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use termwise_kernels::bf16_gemm::{Bf16Isa, Bf16Workspace, PackedBf16};
use termwise_kernels::gemm::{Matrix, Write, product};

use crate::architecture::Architecture;
use crate::error::Result;
use crate::params::Params;

/// The precision of products: of linear layers (projections, MLP and output projection), and of scores and values of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// float32
    #[default]
    F32,
    /// Inputs rounded to bfloat16, sums in float32.
    Bf16,
}

impl Precision {
    /// A warning if this machine has no instructions for it.
    pub fn warning(self) -> Option<&'static str> {
        (self == Precision::Bf16 && !Bf16Isa::selected().is_native()).then_some(
            "this machine has no AVX512-BF16 instructions: bf16 rounds inputs and multiplies in float32, which is slower than --precision f32",
        )
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
        })
    }
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> Result<Precision, String> {
        match text {
            "f32" | "float32" => Ok(Precision::F32),
            "bf16" | "bfloat16" => Ok(Precision::Bf16),
            _ => Err("it must be f32 or bf16".into()),
        }
    }
}

/// A weight matrix [N, C] of the flat parameter buffer.
#[derive(Clone, Copy)]
pub struct Weight<'a> {
    matrix: Matrix<'a>,
    offset: usize,
}

impl<'a> Weight<'a> {
    /// The matrix `values` with rows of `inputs` values, at this offset of the flat buffer.
    pub fn new(values: &'a [f32], offset: usize, inputs: usize) -> Weight<'a> {
        Weight { matrix: Matrix::new(values, values.len() / inputs, inputs), offset }
    }

    /// C
    pub fn inputs(self) -> usize {
        self.matrix.columns()
    }

    /// The matrix in this range of the flat buffer.
    pub fn of(params: &'a [f32], range: &Range<usize>, inputs: usize) -> Weight<'a> {
        Weight::new(&params[range.clone()], range.start, inputs)
    }
}

/// The products of a session.
pub enum Products {
    /// In float32.
    F32,
    /// With inputs rounded to bfloat16.
    Bf16(Box<Bf16Products>),
}

/// The rounded weights of a model, and the memory of products.
#[derive(Default)]
pub struct Bf16Products {
    /// In the order of offsets.
    weights: Vec<Bf16Weight>,
    /// The versions of the parameters that [`Bf16Weight::forward`] and [`Bf16Weight::backward`] contain.
    versions: [Option<u64>; 2],
    workspace: Bf16Workspace,
}

struct Bf16Weight {
    range: Range<usize>,
    inputs: usize,
    /// Wᵀ, the right operand of x Wᵀ.
    forward: PackedBf16,
    /// W, the right operand of dy W.
    backward: PackedBf16,
}

impl Products {
    pub(crate) fn new(precision: Precision, architecture: &Architecture) -> Products {
        if precision == Precision::F32 {
            return Products::F32;
        }
        let blocks = architecture.blocks.iter();
        let linears = blocks.flat_map(|block| {
            [&block.qkv, &block.output, &block.gate_up, &block.down].into_iter().chain(block.gates.iter().map(|gate| &gate.1))
        });
        let ranges =
            linears.map(|linear| (linear.weight.clone(), linear.inputs)).chain([(architecture.lm_head.clone(), architecture.widths.c)]);
        let weight = |(range, inputs)| Bf16Weight { range, inputs, forward: PackedBf16::default(), backward: PackedBf16::default() };
        let mut weights: Vec<Bf16Weight> = ranges.map(weight).collect();
        weights.sort_by_key(|weight| weight.range.start);
        Products::Bf16(Box::new(Bf16Products { weights, ..Bf16Products::default() }))
    }

    /// Rounds the weights if the parameters have changed. Call it before the products of a pass.
    pub(crate) fn prepare(&mut self, params: &Params, with_backward: bool) -> Result<()> {
        let Products::Bf16(products) = self else { return Ok(()) };
        let Bf16Products { weights, versions, .. } = &mut **products;
        let version = Some(params.version());
        let stale = [versions[0] != version, with_backward && versions[1] != version];
        for Bf16Weight { range, inputs, forward, backward } in weights.iter_mut().filter(|_| stale.contains(&true)) {
            let weight = Weight::of(params.values(), range, *inputs).matrix;
            if stale[0] {
                forward.pack(weight.transposed())?;
            }
            if stale[1] {
                backward.pack(weight)?;
            }
        }
        versions.iter_mut().zip(stale).filter(|(_, stale)| *stale).for_each(|(known, _)| *known = version);
        Ok(())
    }

    /// y [M, N] = or += x Wᵀ, with rows of y `step` apart.
    pub fn forward(&mut self, y: &mut [f32], step: usize, write: Write, x: Matrix, weight: Weight) -> Result<()> {
        match self {
            Products::F32 => product(y, step, write, x, weight.matrix.transposed()),
            Products::Bf16(products) => {
                let Bf16Products { weights, workspace, .. } = &mut **products;
                workspace.product_packed(y, step, write, x, &find(weights, weight).forward)?;
            }
        }
        Ok(())
    }

    /// dx [M, C] = or += dy W.
    pub fn input_gradient(&mut self, dx: &mut [f32], write: Write, dy: Matrix, weight: Weight) -> Result<()> {
        let width = weight.inputs();
        match self {
            Products::F32 => product(dx, width, write, dy, weight.matrix),
            Products::Bf16(products) => {
                let Bf16Products { weights, workspace, .. } = &mut **products;
                workspace.product_packed(dx, width, write, dy, &find(weights, weight).backward)?;
            }
        }
        Ok(())
    }

    /// dW [N, C] += dyᵀ x.
    pub fn weight_gradient(&mut self, dweight: &mut [f32], dy: Matrix, x: Matrix) -> Result<()> {
        match self {
            Products::F32 => product(dweight, x.columns(), Write::Add, dy.transposed(), x),
            Products::Bf16(products) => products.workspace.product(dweight, x.columns(), Write::Add, dy.transposed(), x)?,
        }
        Ok(())
    }
}

fn find<'a>(weights: &'a [Bf16Weight], weight: Weight) -> &'a Bf16Weight {
    let at = weights.binary_search_by_key(&weight.offset, |own| own.range.start).expect("every linear layer is packed");
    &weights[at]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::Config;
    use crate::ops::testing::numbers;
    use crate::params::ParamLayout;
    use termwise_kernels::bf16_gemm::round;

    #[test]
    fn names_of_precisions_are_read_back() {
        for precision in [Precision::F32, Precision::Bf16] {
            assert_eq!(precision.to_string().parse(), Ok(precision));
        }
        assert!("bfloat16".parse() == Ok(Precision::Bf16) && "fp8".parse::<Precision>().is_err());
    }

    /// The three products equal those of rounded operands in float64, and follow a change of the parameters.
    #[test]
    fn bf16_products_use_the_current_rounded_weights() {
        let config = Config::from_json_str(
            r#"{"model_type":"llama","vocab_size":40,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":1,"num_attention_heads":2}"#,
            "a test",
        )
        .expect("a configuration");
        let layout = Arc::new(ParamLayout::new(&config).expect("a layout"));
        let mut params = Params::zeros(layout.clone()).expect("memory");
        let architecture = layout.architecture();
        let layer = &architecture.blocks[0].down;
        let (m, n, c) = (37, layer.outputs, layer.inputs);
        let (x, dy) = (numbers(m * c, 1), numbers(m * n, 2));
        let mut products = Products::new(Precision::Bf16, architecture);
        for seed in [3, 4] {
            let values = numbers(params.values().len(), seed);
            params.values_mut().copy_from_slice(&values);
            products.prepare(&params, true).expect("memory");
            let weight = Weight::of(params.values(), &layer.weight, c);
            let w = &params.values()[layer.weight.clone()];
            let (mut y, mut dx, mut dw) = (vec![0.0; m * n], vec![0.0; m * c], vec![0.0; n * c]);
            products.forward(&mut y, n, Write::Replace, Matrix::new(&x, m, c), weight).expect("memory");
            products.input_gradient(&mut dx, Write::Replace, Matrix::new(&dy, m, n), weight).expect("memory");
            products.weight_gradient(&mut dw, Matrix::new(&dy, m, n), Matrix::new(&x, m, c)).expect("memory");
            let sum = |count: usize, f: &dyn Fn(usize) -> [f32; 2]| -> f64 {
                (0..count).map(|l| f(l).map(|x| round(x) as f64)).map(|[a, b]| a * b).sum()
            };
            for i in 0..m {
                (0..n).for_each(|j| assert!((y[i * n + j] as f64 - sum(c, &|l| [x[i * c + l], w[j * c + l]])).abs() < 1e-5, "y {seed}"));
                (0..c).for_each(|j| assert!((dx[i * c + j] as f64 - sum(n, &|l| [dy[i * n + l], w[l * c + j]])).abs() < 1e-5, "dx {seed}"));
            }
            for (i, j) in (0..n).flat_map(|i| (0..c).map(move |j| (i, j))) {
                assert!((dw[i * c + j] as f64 - sum(m, &|l| [dy[l * n + i], x[l * c + j]])).abs() < 1e-5, "dW {seed}");
            }
        }
    }
}
