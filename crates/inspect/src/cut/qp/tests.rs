use super::*;
use termwise_base::rng::Rng;

/// The conditions that only a solution of a convex program meets.
fn assert_optimal(program: &Program, solution: &Solution) {
    let n = program.gradient.len();
    let size = program.hessian.iter().chain(&program.gradient).fold(1.0f64, |size, h| size.max(h.abs()));
    let residual = program.dual_residual(&solution.x, &solution.multipliers, solution.equation);
    assert!(residual.iter().all(|r| r.abs() < 1e-8 * size), "stationary: {residual:?}");
    if let Some((a, b)) = &program.equation {
        assert!((dot(a, &solution.x) - b).abs() < 1e-9, "equation: {} {b}", dot(a, &solution.x));
    }
    for (i, (row, bound)) in program.rows.chunks_exact(n).zip(&program.bounds).enumerate() {
        let slack = dot(row, &solution.x) - bound;
        assert!(slack > -1e-9 && solution.multipliers[i] >= 0.0, "row {i}: {slack}, {}", solution.multipliers[i]);
        assert!((slack * solution.multipliers[i]).abs() < 1e-8 * size, "row {i} is neither tight nor free");
    }
}

#[test]
fn by_hand() {
    // (x − 1)² + (y − 2)² with x + y = 1 and y ≤ 0.5.
    let program = Program {
        hessian: vec![2.0, 0.0, 0.0, 2.0],
        gradient: vec![-2.0, -4.0],
        equation: Some((vec![1.0, 1.0], 1.0)),
        rows: vec![0.0, -1.0],
        bounds: vec![-0.5],
    };
    let solution = program.solve(&[0.0, 0.0]).expect("a solution");
    assert!((solution.x[0] - 0.5).abs() < 1e-9 && (solution.x[1] - 0.5).abs() < 1e-9, "{:?}", solution.x);
    // From stationarity: 2x − 2 = ν, 2y − 4 = −λ + ν.
    assert!((solution.equation + 1.0).abs() < 1e-7 && (solution.multipliers[0] - 2.0).abs() < 1e-7, "{solution:?}");
    assert_optimal(&program, &solution);
    let free = Program { rows: vec![], bounds: vec![], ..program };
    let solution = free.solve(&[5.0, 5.0]).expect("a solution");
    assert!(solution.x[0].abs() < 1e-9 && (solution.x[1] - 1.0).abs() < 1e-9);
}

#[test]
fn random_programs_meet_the_conditions() {
    let mut rng = Rng::new(3);
    let mut tight = 0;
    for case in 0..60usize {
        let (n, m) = (1 + case % 9, 3 + (case * 7) % 60);
        let mut numbers = |count: usize| (0..count).map(|_| rng.normal()).collect::<Vec<f64>>();
        // Fewer factors than unknowns now and then: H is then singular.
        let rank = if case % 4 == 0 { n.div_ceil(2) } else { n + 2 };
        let factor = numbers(rank * n);
        let hessian = (0..n * n).map(|at| (0..rank).map(|k| factor[k * n + at / n] * factor[k * n + at % n]).sum()).collect();
        let (inside, rows) = (numbers(n), numbers(m * n));
        let bounds = (0..m).map(|i| dot(&rows[i * n..][..n], &inside) - 0.3).collect();
        let a = numbers(n);
        let equation = (case % 3 > 0).then(|| (a.clone(), dot(&a, &inside)));
        // A gradient in the range of Hᵀ and of the rows' cone: the program is bounded.
        let gradient = (0..n).map(|i| -(0..rank).map(|k| factor[k * n + i]).sum::<f64>() * 2.0).collect();
        let program = Program { hessian, gradient, equation, rows, bounds };
        let solution = program.solve(&vec![0.0; n]).unwrap_or_else(|| panic!("case {case}"));
        assert_optimal(&program, &solution);
        tight += solution.multipliers.iter().filter(|lambda| **lambda > 1e-6).count();
    }
    assert!(tight > 50, "only {tight} bounds were ever tight");
}

#[test]
fn what_cannot_be_met_is_not_claimed() {
    let program = Program { hessian: vec![1.0], gradient: vec![0.0], equation: None, rows: vec![1.0, -1.0], bounds: vec![1.0, 1.0] };
    assert!(program.solve(&[0.0]).is_none());
}
