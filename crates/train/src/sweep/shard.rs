//! The index of this process among those that share a sweep.

use std::str::FromStr;

/// One of N processes. It starts with every N-th run, then takes runs that others have not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// From 0.
    pub index: usize,
    /// Number of processes; unknown if only the index is known.
    pub count: Option<usize>,
}

impl Shard {
    /// Reads the environment variables of schedulers: Slurm arrays and tasks, Open MPI, PMI, Kubernetes indexed jobs. `None` if none of them has started
    /// this process.
    pub fn of_environment(variable: impl Fn(&str) -> Option<String>) -> Option<Shard> {
        let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
        let of = |index: &str, count: &str| Some((number(index)?, number(count)?.max(1)));
        let pair = of("SLURM_PROCID", "SLURM_NTASKS")
            .or_else(|| of("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
            .or_else(|| of("PMI_RANK", "PMI_SIZE"));
        let array = || {
            let first = number("SLURM_ARRAY_TASK_MIN").unwrap_or(0);
            let step = number("SLURM_ARRAY_TASK_STEP").unwrap_or(1).max(1);
            Some(((number("SLURM_ARRAY_TASK_ID")?.checked_sub(first)?) / step, number("SLURM_ARRAY_TASK_COUNT")?.max(1)))
        };
        match (array(), pair) {
            // Tasks of a job that is part of an array.
            (Some((task, tasks)), Some((rank, ranks))) => Some(Shard { index: task * ranks + rank, count: Some(tasks * ranks) }),
            (Some((index, count)), None) | (None, Some((index, count))) => Some(Shard { index, count: Some(count) }),
            (None, None) => Some(Shard { index: number("JOB_COMPLETION_INDEX")?, count: None }),
        }
    }

    /// The order in which this process visits this many runs.
    pub(super) fn order(self, runs: &[usize]) -> Vec<usize> {
        let count = self.count.unwrap_or(runs.len()).max(1);
        let own = self.index % count;
        let (mut first, others): (Vec<usize>, Vec<usize>) = (0..runs.len()).partition(|place| place % count == own);
        // After its own runs, those that follow them: processes that finish early then help different shards.
        let begin = others.iter().position(|&place| place > own).unwrap_or(0);
        first.extend(others[begin..].iter().chain(&others[..begin]));
        first.into_iter().map(|place| runs[place]).collect()
    }
}

/// `2/8` is the second of eight.
impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Shard, String> {
        let numbers = text.split_once('/').and_then(|(k, n)| Some((k.trim().parse().ok()?, n.trim().parse().ok()?)));
        match numbers {
            Some((k, n)) if (1..=n).contains(&k) => Ok(Shard { index: k - 1, count: Some(n) }),
            _ => Err("a shard has the form K/N, from 1/N to N/N".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Option<(usize, Option<usize>)> {
        let find = |name: &str| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned());
        Shard::of_environment(find).map(|shard| (shard.index, shard.count))
    }

    #[test]
    fn scheduler_variables_are_parsed() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("SLURM_PROCID", "3"), ("SLURM_NTASKS", "8")]), Some((3, Some(8))));
        assert_eq!(
            of(&[("SLURM_ARRAY_TASK_ID", "12"), ("SLURM_ARRAY_TASK_MIN", "10"), ("SLURM_ARRAY_TASK_COUNT", "4")]),
            Some((2, Some(4)))
        );
        let both = [
            ("SLURM_ARRAY_TASK_ID", "6"),
            ("SLURM_ARRAY_TASK_MIN", "2"),
            ("SLURM_ARRAY_TASK_STEP", "2"),
            ("SLURM_ARRAY_TASK_COUNT", "3"),
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
        ];
        assert_eq!(of(&both), Some((5, Some(6))));
        assert_eq!(of(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")]), Some((1, Some(2))));
        assert_eq!(of(&[("PMI_RANK", "0"), ("PMI_SIZE", "4")]), Some((0, Some(4))));
        assert_eq!(of(&[("JOB_COMPLETION_INDEX", "7")]), Some((7, None)));
        assert_eq!(of(&[("SLURM_PROCID", "many"), ("SLURM_NTASKS", "8")]), None);
    }

    #[test]
    fn every_process_visits_all_runs_starting_with_its_own() {
        let runs: Vec<usize> = (10..17).collect();
        let order = |text: &str| text.parse::<Shard>().expect("a shard").order(&runs);
        assert_eq!(order("1/1"), runs);
        assert_eq!(order("1/3"), [10, 13, 16, 11, 12, 14, 15]);
        assert_eq!(order("3/3"), [12, 15, 13, 14, 16, 10, 11]);
        assert_eq!(Shard { index: 9, count: None }.order(&runs), [12, 13, 14, 15, 16, 10, 11]);
        assert!(Shard { index: 0, count: None }.order(&[]).is_empty());
        for bad in ["", "0/3", "4/3", "1", "a/b", "-1/3"] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }
}
