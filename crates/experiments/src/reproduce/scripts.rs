//! Scripts that train the paper's models with PyTorch, on one machine with GPUs and with Slurm. Edit them before use.

use termwise_report::{Unit, duration};

use super::paper::PaperRun;

/// GPUs of a machine that memory and time are planned for.
pub const GPUS: u64 = 8;
/// Requested time as a multiple of the estimate, which assumes a share of peak performance and omits checkpoints and evaluations.
const TIME_FACTOR: f64 = 2.0;
/// Maximum requested time; a longer run resumes when its job is submitted again.
const MAX_HOURS: f64 = 168.0;

const SCRIPT_HEADER: &str = "\
# Each run is a folder in runs/, as written by `termwise train`: `termwise runs runs` lists them; `termwise eval`, `spectrum` and `truncate` read them.
# A restarted run resumes from its newest checkpoint; a finished run exits immediately.
# Memory and time are estimates from data sheets and operation counts. They were not measured.
";

fn list(runs: &[PaperRun]) -> String {
    let line = |run: &PaperRun| {
        let (parameters, tokens) = (Unit::Number.format(run.parameters as f64), Unit::Number.format(run.tokens as f64));
        let memory = Unit::Bytes.format(run.gpu_memory as f64);
        let time = duration(run.gpu_seconds);
        format!(
            "    {}   # {}, {}: {parameters} parameters, {tokens} tokens; {memory} a GPU, about {time}\n",
            run.hash, run.task, run.variant
        )
    };
    runs.iter().map(line).collect()
}

/// One after another on one machine.
pub fn node(runs: &[PaperRun]) -> String {
    let total = duration(runs.iter().map(|run| run.gpu_seconds).sum());
    format!(
        "#!/usr/bin/env bash
# The paper's runs, one after another on one machine with GPUs: about {total} in all on {GPUS} A100.
{SCRIPT_HEADER}#
# Usage: ./node.sh          all runs; GPUS=4 ./node.sh takes four GPUs
set -euo pipefail
cd \"$(dirname \"${{BASH_SOURCE[0]}}\")\"
GPUS=\"${{GPUS:-$(python3 -c 'import torch; print(torch.cuda.device_count())')}}\"
runs=(
{list})
for run in \"${{runs[@]}}\"; do
    resume=()
    if [ -e \"runs/$run/settings.toml\" ]; then resume=(--resume); fi
    torchrun --standalone --nproc-per-node \"$GPUS\" -m termwise.torch.train \"runs/$run.toml\" --folder \"runs/$run\" \"${{resume[@]}}\"
done
",
        list = list(runs)
    )
}

/// An array of jobs, one for each run.
pub fn slurm(runs: &[PaperRun]) -> String {
    let longest = runs.iter().map(|run| run.gpu_seconds).fold(0.0, f64::max);
    let hours = (TIME_FACTOR * longest / 3600.0).ceil().clamp(1.0, MAX_HOURS);
    format!(
        "#!/bin/bash
# The paper's runs by Slurm: a job for each, on one node with {GPUS} GPUs. Submit it here with: sbatch paper.sbatch
{SCRIPT_HEADER}#
#SBATCH --job-name=termwise-paper
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={GPUS}
#SBATCH --cpus-per-task=32
#SBATCH --time={hours:.0}:00:00
# Five minutes before the time is over a checkpoint is written, and the job ends; submitted again it goes on.
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A-%a.log
set -euo pipefail
cd \"$SLURM_SUBMIT_DIR\"
runs=(
{list})
run=\"${{runs[$SLURM_ARRAY_TASK_ID]}}\"
resume=()
if [ -e \"runs/$run/settings.toml\" ]; then resume=(--resume); fi
# With --nodes=2 or more, the processes of all nodes meet at the first.
first=\"$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)\"
exec srun torchrun --nnodes \"$SLURM_NNODES\" --nproc-per-node \"$SLURM_GPUS_ON_NODE\" --rdzv-id \"$SLURM_JOB_ID\" \\
    --rdzv-backend c10d --rdzv-endpoint \"$first:29500\" \\
    -m termwise.torch.train \"runs/$run.toml\" --folder \"runs/$run\" \"${{resume[@]}}\"
",
        last = runs.len().max(1) - 1,
        list = list(runs)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(hash: &str, seconds: f64) -> PaperRun {
        PaperRun {
            hash: hash.into(),
            task: "E1".into(),
            variant: "softmax".into(),
            attention: "softmax".into(),
            seed: 1,
            parameters: 275_000_000,
            tokens: 5_000_000_000,
            flops: 1e19,
            seconds_here: 1e9,
            gpu_seconds: seconds,
            gpu_memory: 30_000_000_000,
        }
    }

    #[test]
    fn scripts_name_every_run_and_are_shell() {
        let runs = [run("aaaa", 3600.0), run("bbbb", 36_000.0)];
        for script in [node(&runs), slurm(&runs)] {
            assert!(script.contains("    aaaa   # E1, softmax") && script.contains("\n    bbbb   #"), "{script}");
            let mut shell = std::process::Command::new("bash").args(["-n", "-c", &script]).spawn().expect("bash");
            assert!(shell.wait().expect("an end").success(), "{script}");
        }
        let script = slurm(&runs);
        assert!(script.contains("#SBATCH --array=0-1\n") && script.contains("#SBATCH --time=20:00:00\n"), "{script}");
    }
}
