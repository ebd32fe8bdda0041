//! The series in a variant string.

use crate::parts::kernel::taylor::{Coefficients, MAX_ORDER, Taylor};
use crate::parts::slot::{Info, Part, number, short};

impl Part for Taylor {
    const INFO: Info = Info {
        word: "taylor",
        usage: "taylor=ORDERS[,coef=learned|A:B:...]",
        formula: "w(x) = Σ_n a_n·x^n/n!, n ∈ orders",
        about: "Any set of orders of the exponential series: `0..4`, `1`, `0,2,4`; coefficients 1, given, or learned per head.",
        examples: &["0..4", "1", "0..2,5", "0..2,coef=learned", "0..2,coef=1.0:0.9:0.5", "0..79"],
    };

    fn parse(args: &str) -> Result<Self, String> {
        let mut orders = Vec::new();
        let mut coefficients = Coefficients::Ones;
        let order = |text: &str| match text.trim().parse::<usize>() {
            Ok(n) if n <= MAX_ORDER => Ok(n),
            _ => Err(format!("an order is a whole number from 0 to {MAX_ORDER}, found `{text}`")),
        };
        for item in args.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            if let Some(value) = item.strip_prefix("coef=") {
                coefficients = match value {
                    "learned" => Coefficients::Learned,
                    "1" => Coefficients::Ones,
                    list => Coefficients::Given(list.split(':').map(|x| number("a coefficient", x, false)).collect::<Result<_, _>>()?),
                };
            } else if let Some((first, last)) = item.split_once("..") {
                let (first, last) = (order(first)?, order(last.trim_start_matches('='))?);
                if first > last {
                    return Err(format!("the range `{item}` is descending"));
                }
                orders.extend(first..=last);
            } else {
                orders.push(order(item)?);
            }
        }
        Taylor::new(orders, coefficients)
    }

    fn args(&self) -> String {
        let mut items = vec![self.orders_text()];
        match &self.coefficients {
            Coefficients::Ones => {}
            Coefficients::Learned => items.push("coef=learned".into()),
            Coefficients::Given(given) => {
                items.push(format!("coef={}", given.iter().map(|&x| short(x)).collect::<Vec<_>>().join(":")));
            }
        }
        items.join(",")
    }
}

impl Taylor {
    /// Only the orders, as in `0..2,5`.
    pub(crate) fn orders_text(&self) -> String {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for &n in &self.orders {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == n => *last = n,
                _ => runs.push((n, n)),
            }
        }
        let run = |&(first, last): &(usize, usize)| if first == last { first.to_string() } else { format!("{first}..{last}") };
        runs.iter().map(run).collect::<Vec<_>>().join(",")
    }
}
