use super::*;
use termwise_base::rng::Rng;

/// The conditions that only a solution of a convex program satisfies.
fn assert_optimal(program: &Program, solution: &Solution) {
    let n = program.gradient.len();
    let reach = solution.x.iter().fold(1.0f64, |reach, x| reach.max(x.abs()));
    let size = reach * program.hessian.iter().chain(&program.gradient).fold(1.0f64, |size, h| size.max(h.abs()));
    let residual = program.dual_residual(&solution.x, &solution.multipliers, solution.equation);
    assert!(residual.iter().all(|r| r.abs() <= 1e-8 * size), "stationary: {residual:?}");
    if let Some((a, b)) = &program.equation {
        assert!((dot(a, &solution.x) - b).abs() < 1e-7 * reach, "equation: {} {b}", dot(a, &solution.x));
    }
    for (i, (row, bound)) in program.rows.chunks_exact(n).zip(&program.bounds).enumerate() {
        let slack = dot(row, &solution.x) - bound;
        assert!(slack > -1e-7 * reach && solution.multipliers[i] >= 0.0, "row {i}: {slack}, {}", solution.multipliers[i]);
        assert!((slack * solution.multipliers[i]).abs() < 1e-7 * size, "row {i} is neither tight nor free");
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

/// A feasible convex program with a solution: the constraints contain a ball around a point, and −g is in the range of H. Fewer factors than unknowns
/// sometimes make H singular.
fn random_program(rng: &mut Rng, case: usize) -> Program {
    let (n, m) = (1 + case % 9, (case * 7) % 60);
    let mut numbers = |count: usize| (0..count).map(|_| rng.normal()).collect::<Vec<f64>>();
    let rank = if case.is_multiple_of(4) { n.div_ceil(2) } else { n + 2 };
    let factor = numbers(rank * n);
    let hessian = (0..n * n).map(|at| (0..rank).map(|k| factor[k * n + at / n] * factor[k * n + at % n]).sum()).collect();
    let (inside, rows, weights) = (numbers(n), numbers(m * n), numbers(rank));
    let bounds = (0..m).map(|i| dot(&rows[i * n..][..n], &inside) - 0.3).collect();
    let a = numbers(n);
    let equation = (!case.is_multiple_of(3)).then(|| (a.clone(), dot(&a, &inside)));
    let gradient = (0..n).map(|i| -(0..rank).map(|k| factor[k * n + i] * weights[k]).sum::<f64>() * 2.0).collect();
    Program { hessian, gradient, equation, rows, bounds }
}

#[test]
fn returned_points_are_optimal_and_nearly_all_programs_are_solved() {
    let mut rng = Rng::new(3);
    let (count, mut solved, mut tight) = (4000, 0, 0);
    for case in 0..count {
        let program = random_program(&mut rng, case);
        let Some(solution) = program.solve(&vec![0.0; program.gradient.len()]) else { continue };
        assert_optimal(&program, &solution);
        solved += 1;
        tight += solution.multipliers.iter().filter(|lambda| **lambda > 1e-6).count();
    }
    assert!(solved * 100 >= count * 99, "{solved} of {count} programs were solved");
    assert!(tight > count, "only {tight} bounds were ever tight");
}

#[test]
fn infeasible_programs_are_rejected() {
    // x ≥ 1 and x ≤ −1.
    let free = Program { hessian: vec![1.0], gradient: vec![0.0], equation: None, rows: vec![1.0, -1.0], bounds: vec![1.0, 1.0] };
    assert!(free.solve(&[0.0]).is_none());
    // 0 = 5, without inequalities and with one.
    for (rows, bounds) in [(vec![], vec![]), (vec![1.0], vec![0.0])] {
        let program = Program { equation: Some((vec![0.0], 5.0)), rows, bounds, ..free.clone() };
        assert!(program.solve(&[0.0]).is_none(), "{program:?}");
    }
    // x = 5 and x ≤ 1.
    let program = Program { equation: Some((vec![1.0], 5.0)), rows: vec![-1.0], bounds: vec![-1.0], ..free };
    assert!(program.solve(&[0.0]).is_none());
}

#[test]
fn unbounded_programs_are_rejected() {
    // −x is unbounded, alone, above a bound, and along a null direction of H.
    let line = |rows, bounds| Program { hessian: vec![0.0], gradient: vec![-1.0], equation: None, rows, bounds };
    assert!(line(vec![], vec![]).solve(&[0.0]).is_none());
    assert!(line(vec![1.0], vec![0.0]).solve(&[0.0]).is_none());
    let plane =
        Program { hessian: vec![1.0, 1.0, 1.0, 1.0], gradient: vec![-1.0, 1.0], equation: None, rows: vec![1.0, 0.0], bounds: vec![0.0] };
    assert!(plane.solve(&[0.0, 0.0]).is_none());
    let rotated = Program { hessian: vec![0.36, 0.48, 0.48, 0.64], gradient: vec![-0.8, 0.6], ..plane };
    assert!(rotated.solve(&[1.0, 1.0]).is_none());
}
