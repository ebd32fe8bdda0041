//! Selection of batch rows.

use crate::{Error, State};

impl State {
    /// The state of these batch rows, in this order. A row may occur several times, as in beam search.
    pub fn select(&self, rows: &[usize]) -> Result<State, Error> {
        let batch = self.batch();
        if let Some(row) = rows.iter().find(|&&row| row >= batch) {
            return Err(Error::Shape(format!("there is no batch row {row}: the state has {batch}, counted from 0")));
        }
        let mut selected = self.layer.state_with(rows.len(), self.memory)?;
        fn of<T: Clone>(values: &[T], batch: usize, rows: &[usize]) -> Vec<T> {
            let width = values.len() / batch;
            rows.iter().flat_map(|row| &values[row * width..(row + 1) * width]).cloned().collect()
        }
        let mut steps = self.steps.clone();
        steps.positions = of(&steps.positions, batch, rows);
        steps.scores = of(&steps.scores, batch, rows);
        for tail in &mut steps.tails {
            *tail = of(tail, batch, rows);
        }
        for sums in [&mut steps.in_gate, &mut steps.out_gate, &mut steps.post_gate, &mut steps.decay, &mut steps.log_decay] {
            *sums = of(sums, batch, rows);
        }
        (selected.steps, selected.groups) = (steps, of(&self.groups, batch, rows));
        // With their learned coefficients.
        (selected.kernels, selected.far_kernels) = (self.kernels.clone(), self.far_kernels.clone());
        Ok(selected)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Error, Inputs, Layer, Rope};

    #[test]
    fn selected_rows_continue_unchanged() -> Result<(), Error> {
        for text in ["taylor=0..2 decay=softplus out=cumulative conv=3", "softmax window=4", "softmax in"] {
            let layer = Layer::new(2, 1, 4).rope(Rope::new(4, 100.0, None)?).variant(text)?;
            let number = |seed: usize| ((seed * 7919 + 13) % 101) as f32 / 101.0 - 0.5;
            // Row b of a token depends only on a label of the row, so it is the same at any index.
            let token = |t: usize, labels: &[usize]| -> Vec<Vec<f32>> {
                let of = |width: usize, salt: usize| {
                    labels.iter().flat_map(|b| (0..width).map(move |i| number(b * 1000 + t * 50 + salt + i))).collect::<Vec<f32>>()
                };
                let mut all: Vec<Vec<f32>> = [8, 4, 4].into_iter().enumerate().map(|(i, width)| of(width, 10 * i)).collect();
                all.extend(layer.aux_specs().iter().map(|spec| match spec.aux.is_gate_logits() {
                    true => of(spec.values(1), 40),
                    false => (0..spec.values(1)).map(number).collect(),
                }));
                all
            };
            let step = |state: &mut crate::State, t: usize, labels: &[usize]| -> Result<Vec<f32>, Error> {
                let (all, mut y) = (token(t, labels), vec![0.0; labels.len() * 8]);
                let mut inputs = Inputs::new(&all[0], &all[1], &all[2]);
                for (spec, values) in layer.aux_specs().iter().zip(&all[3..]) {
                    inputs = inputs.with(spec.aux, values);
                }
                state.step(&inputs, &mut y)?;
                Ok(y)
            };
            let mut state = layer.state(3)?;
            for t in 0..6 {
                step(&mut state, t, &[0, 1, 2])?;
            }
            let mut selected = state.select(&[2, 0, 2, 1])?;
            for t in 6..9 {
                let (all, some) = (step(&mut state, t, &[0, 1, 2])?, step(&mut selected, t, &[2, 0, 2, 1])?);
                let expected: Vec<f32> = [2, 0, 2, 1].into_iter().flat_map(|row| all[row * 8..(row + 1) * 8].to_vec()).collect();
                assert_eq!(some, expected, "{text} at {t}");
            }
            assert_eq!((selected.batch(), selected.position(0)), (4, Some(9)));
            assert!(state.select(&[3]).is_err_and(|error| error.to_string().contains("no batch row 3")));
            assert!(state.select(&[]).is_err());
        }
        Ok(())
    }
}
