//! `termwise truncate`.

use std::path::PathBuf;

use clap::Args;
use termwise_analysis::plan::parse_count;
use termwise_analysis::truncate::{self, Budget, Choice, Options, Request};
use termwise_base::files::write_whole;
use termwise_report::to_json;
use termwise_train::log::print_line;

use super::settings::ModelArgs;
use crate::context::{Context, Output};
use crate::error::{Exit, Failure};

/// Measure the loss and memory of a truncated series
///
/// Truncates exp at each order with Taylor coefficients and with coefficients fitted to each head on calibration text: all layers, one layer
/// at a time, and a plan of KV heads that keeps the loss within a budget. Without --data, the held-out part of the training data is used. The
/// first part of the data calibrates, the second tunes the plan, and every reported number is measured on the rest.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  termwise truncate                                       the newest run in runs/, on the held-out part of its own data
  termwise truncate path/to/llama --data book.txt
  termwise truncate path/to/llama --data book.txt --orders 2,4 --budget 2% --context 8192 --save truncated
  termwise truncate path/to/llama --data book.txt --calibration other.txt --out results
  termwise generate truncated --prompt Once          uses the states of the plan
  termwise eval path/to/llama --data book.txt --order 4   equals the Taylor result at order 4 with --calibration

A model that was trained on single documents should be evaluated on them: --layout padded takes one document per window. Windows of packed text
cross document boundaries, where such a model predicts badly and truncation can even lower the loss.

With --out, results are written as they are measured (cut.json, losses.jsonl; at the end index.html with figures and tables). After Ctrl-C the same
command resumes.")]
pub struct TruncateArgs {
    #[command(flatten)]
    pub input: ModelArgs,
    /// Truncation orders
    #[arg(long, value_name = "P,P,...", value_delimiter = ',', default_values_t = [2, 4, 6, 8, 10, 12, 16], value_parser = order)]
    pub orders: Vec<usize>,
    /// Kinds of coefficients to compare: taylor, calibrated
    #[arg(long, value_name = "KIND,...", value_delimiter = ',', default_values_t = Choice::ALL)]
    pub coefficients: Vec<Choice>,
    /// Coefficients for truncating one layer at a time [default: the best ones]
    #[arg(long, value_name = "KIND")]
    pub map: Option<Choice>,
    /// Skip truncating one layer at a time
    #[arg(long)]
    pub no_map: bool,
    /// Largest relative loss increase for the plan, such as 1%
    #[arg(long, value_name = "SHARE", default_value = "1%")]
    pub budget: Budget,
    /// Skip the plan
    #[arg(long)]
    pub no_plan: bool,
    /// Context length at which memory is counted [default: the context of the model]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub context: Option<u64>,
    /// Text for calibration and tuning; all of --data is then evaluated [default: the first half of --data]
    #[arg(long, value_name = "PATH")]
    pub calibration: Vec<String>,
    /// Sampled queries per head for fitting coefficients
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = crate::args::size(1 << 24))]
    pub queries: usize,
    /// Fit each layer on the output of the truncated layers below it; needs one pass per layer and order
    #[arg(long)]
    pub sequential: bool,
    /// Tokens per window [default: as in training, otherwise 1024 or the context of the model]
    #[arg(long, value_name = "N", value_parser = crate::args::size(1 << 20))]
    pub length: Option<usize>,
    /// Windows per batch
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = crate::args::size(1 << 16))]
    pub batch: usize,
    /// Largest number of batches [default: all]
    #[arg(long, value_name = "N")]
    pub batches: Option<u64>,
    /// Write the truncated model into this folder: by the plan, or all layers with --save-order
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// With --save: replace a model in the folder
    #[arg(long, requires = "save")]
    pub overwrite: bool,
    /// With --save: truncate all layers at this order, calibrated
    #[arg(long, value_name = "P", requires = "save", value_parser = order)]
    pub save_order: Option<usize>,
    #[command(flatten)]
    pub output: Output,
}

fn order(text: &str) -> Result<usize, String> {
    match text.trim().parse() {
        Ok(order) if order <= 60 => Ok(order),
        _ => Err("an order is a whole number up to 60".into()),
    }
}

pub fn run(args: &TruncateArgs, context: &mut Context) -> Result<Exit, Failure> {
    context.join()?;
    let request = Request {
        model: args.input.model.clone(),
        text: args.input.text(),
        calibration: args.calibration.clone(),
        options: Options {
            orders: args.orders.clone(),
            coefficients: args.coefficients.clone(),
            map: args.map,
            draw_map: !args.no_map,
            budget: (!args.no_plan).then_some(args.budget),
            context: args.context,
            queries: args.queries,
            sequential: args.sequential,
            journal: args.output.out.as_ref().map(|folder| folder.join("losses.jsonl")),
            collective: context.ranks.collective.clone(),
        },
        length: args.length,
        batch: args.batch,
        batches: args.batches.unwrap_or(0),
        save: args.save.clone(),
        save_order: args.save_order,
        overwrite: args.overwrite,
    };
    let (silent, quiet) = (context.is_silent(), args.output.print.quiet);
    let (made_by, mut written) = (context.provenance.clone(), Ok(()));
    let (found, stopped) = context.compute(quiet, Some("finishing this measurement"), |monitor| {
        truncate::measure(&request, monitor, &mut |report| {
            if let (Some(folder), Ok(()), false) = (&args.output.out, &written, silent) {
                written = write_whole(&folder.join("cut.json"), to_json(report, Some(&made_by)).as_bytes());
            }
        })
    })?;
    written?;
    context.emit(&found.report, &args.output)?;
    if let Some(error) = found.not_saved {
        return Err(error.into());
    }
    if let Some(to) = args.save.as_ref().filter(|_| !quiet && !silent) {
        print_line(&format!("saved: {}", to.display()));
    }
    Ok(Exit::stopped(stopped))
}
