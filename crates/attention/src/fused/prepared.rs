//! Read-only view of the prepared tensors of a call.

use crate::fused::call::Call;
use crate::fused::prepare::channel_decay::{ChannelDecayScratch, ChannelDecays};
use crate::fused::prepare::gates::{GateFactors, GateScratch};
use crate::fused::prepare::{PreparedRows, PreparedValues, RowTables};
use crate::layer::RowSources;

/// Inputs of tiles, chunks and the write rule.
#[derive(Clone, Copy)]
pub(in crate::fused) struct Prepared<'a> {
    pub call: Call<'a>,
    pub sources: RowSources<'a>,
    pub gates: GateFactors<'a>,
    pub channels: ChannelDecays<'a>,
    /// Shapes as in [`PreparedRows`].
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub kt: &'a [f32],
    /// Shapes as in [`PreparedValues`]; empty while the write rule computes them.
    pub v: &'a [f32],
    pub vt: &'a [f32],
}

impl<'a> Prepared<'a> {
    /// Without values.
    pub fn new(
        call: Call<'a>,
        tables: &'a RowTables,
        gates: &'a GateScratch,
        rows: &'a PreparedRows,
        channel_decay: &'a ChannelDecayScratch,
    ) -> Prepared<'a> {
        Prepared {
            call,
            sources: RowSources::of_call(&call, tables),
            gates: GateFactors::new(&call, gates),
            channels: ChannelDecays::new(&call, gates, rows, channel_decay),
            q: &rows.q,
            k: &rows.k,
            kt: &rows.kt,
            v: &[],
            vt: &[],
        }
    }

    pub fn with_values(self, values: &'a PreparedValues) -> Prepared<'a> {
        Prepared { v: &values.v, vt: &values.vt, ..self }
    }
}
