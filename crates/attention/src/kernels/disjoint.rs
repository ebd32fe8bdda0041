//! One tensor for several threads: blocks that do not overlap, handed out once each.

use std::marker::PhantomData;

use rayon::prelude::*;

/// Equally spaced places.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// How many.
    pub count: usize,
    /// From one to the next.
    pub step: usize,
}

/// A tensor [batch, heads, rows, width] in any order of its first three axes; values of a row are contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Axes {
    /// B
    pub batch: Axis,
    /// H or G
    pub heads: Axis,
    /// T
    pub rows: Axis,
    /// Values of a row.
    pub width: usize,
}

impl Axes {
    /// Values from the first to the last, where no two places overlap.
    fn extent(&self) -> Option<usize> {
        let mut axes = [self.batch, self.heads, self.rows];
        axes.sort_by_key(|axis| axis.step);
        axes.iter().try_fold(self.width, |extent, axis| match axis.count {
            0 => None,
            1 => Some(extent),
            count if axis.step >= extent => (count - 1).checked_mul(axis.step)?.checked_add(extent),
            _ => None,
        })
    }
}

/// A mutable tensor that tasks divide among themselves.
pub struct Disjoint<'a, T> {
    at: *mut T,
    axes: Axes,
    values: PhantomData<&'a mut [T]>,
}

// SAFETY: a tensor is a unique borrow of its places, like `&mut [T]`.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// # Panics
    /// Where places overlap, or reach beyond the values.
    pub fn new(values: &'a mut [T], axes: Axes) -> Disjoint<'a, T> {
        let fits = axes.extent().is_some_and(|extent| extent <= values.len());
        assert!(fits, "{axes:?} overlap, or do not fit into {} values", values.len());
        Disjoint { at: values.as_mut_ptr(), axes, values: PhantomData }
    }

    /// Three tensors whose rows lie side by side.
    ///
    /// # Panics
    /// Where places overlap, or reach beyond the values.
    pub fn side_by_side(values: &'a mut [T], all: [Axes; 3]) -> [Disjoint<'a, T>; 3] {
        let at = values.as_mut_ptr();
        let row = |axes: &Axes| axes.heads.count * axes.width;
        let stride = all[0].rows.step;
        let alike =
            all.iter().all(|axes| axes.rows.step == stride && axes.heads.step == axes.width && axes.batch.step == axes.rows.count * stride);
        let rows = all[0].batch.count * all[0].rows.count;
        let same = all.iter().all(|axes| axes.batch.count * axes.rows.count == rows);
        assert!(
            alike && same && all.iter().map(row).sum::<usize>() <= stride && rows * stride <= values.len(),
            "{all:?} are not side by side"
        );
        let mut first = 0;
        all.map(|axes| {
            // SAFETY: the columns from `first` on, as wide as a row of this tensor, lie within each row of the values, and no other
            // tensor has them.
            let own = Disjoint { at: unsafe { at.add(first) }, axes, values: PhantomData };
            first += row(&axes);
            own
        })
    }

    /// Blocks of `group` heads and of the rows between two `cuts` (which ascend from 0 to the number of rows), in the order
    /// [batch, groups, cuts].
    ///
    /// # Panics
    /// Where the groups or the cuts do not divide the tensor.
    pub fn blocks(self, group: usize, cuts: &'a [usize]) -> Blocks<'a, T> {
        let whole = cuts.is_sorted() && cuts.first() == Some(&0) && cuts.last() == Some(&self.axes.rows.count);
        assert!(
            whole && group > 0 && self.axes.heads.count.is_multiple_of(group),
            "blocks of {group} heads and rows {cuts:?} of {:?}",
            self.axes
        );
        let count = self.axes.batch.count * (self.axes.heads.count / group) * (cuts.len() - 1);
        Blocks { at: self.at, axes: self.axes, group, cuts, count, turn: 0, values: PhantomData }
    }
}

/// The blocks of a tensor, for tasks that run in parallel.
pub struct Blocks<'a, T> {
    at: *mut T,
    axes: Axes,
    group: usize,
    cuts: &'a [usize],
    count: usize,
    turn: usize,
    values: PhantomData<&'a mut [T]>,
}

// SAFETY: blocks are a unique borrow of their places, like `&mut [T]`; shared, they only give blocks to `par`, each once.
unsafe impl<T: Send> Send for Blocks<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Blocks<'_, T> {}

impl<'a, T> Blocks<'a, T> {
    /// So many blocks without any places, for a tensor that a call does without.
    pub fn empty(count: usize) -> Blocks<'a, T> {
        let none = Axis { count: 0, step: 0 };
        let axes = Axes { batch: none, heads: Axis { count: 1, step: 0 }, rows: none, width: 0 };
        Blocks { at: std::ptr::NonNull::dangling().as_ptr(), axes, group: 1, cuts: &[0, 0], count, turn: 0, values: PhantomData }
    }

    /// A slice cut into `count` equal pieces; empty ones where it has no values.
    pub fn pieces(values: &'a mut [T], count: usize) -> Blocks<'a, T> {
        if values.is_empty() {
            return Blocks::empty(count);
        }
        let width = values.len() / count;
        let one = Axis { count: 1, step: 0 };
        Disjoint::new(values, Axes { batch: Axis { count, step: width }, heads: one, rows: one, width }).blocks(1, &[0, 1])
    }

    /// The same blocks, where those between cuts come in turned order: first the one after `turn` others.
    pub fn turned(self, turn: usize) -> Blocks<'a, T> {
        Blocks { turn, ..self }
    }

    /// Every block once, in parallel.
    pub fn par(self) -> impl IndexedParallelIterator<Item = Block<'a, T>>
    where
        T: Send,
    {
        (0..self.count).into_par_iter().map(move |index| self.block(index))
    }

    fn block(&self, index: usize) -> Block<'a, T> {
        let parts = self.cuts.len() - 1;
        let (rest, part) = (index / parts, (index % parts + self.turn) % parts);
        let groups = self.axes.heads.count / self.group;
        let (b, g) = (rest / groups, rest % groups);
        let first = b * self.axes.batch.step + g * self.group * self.axes.heads.step + self.cuts[part] * self.axes.rows.step;
        let rows = Axis { count: self.cuts[part + 1] - self.cuts[part], ..self.axes.rows };
        let heads = Axis { count: self.group, ..self.axes.heads };
        // SAFETY: within the tensor, whose extent was checked; an empty block may start one past its end.
        Block { at: unsafe { self.at.add(first) }, heads, rows, width: self.axes.width, values: PhantomData }
    }
}

/// Some heads and rows of a tensor, which nobody else has.
pub struct Block<'a, T> {
    at: *mut T,
    heads: Axis,
    rows: Axis,
    width: usize,
    values: PhantomData<&'a mut [T]>,
}

// SAFETY: a block is a unique borrow of its places, like `&mut [T]`.
unsafe impl<T: Send> Send for Block<'_, T> {}

impl<T> Block<'_, T> {
    /// Whether it has no places.
    pub fn is_empty(&self) -> bool {
        self.rows.count == 0
    }

    /// The same places, for as long as this block is not used itself.
    pub fn again(&mut self) -> Block<'_, T> {
        Block { values: PhantomData, ..*self }
    }

    /// A block of one row as a slice; nothing where it is empty.
    pub fn piece(&mut self) -> &mut [T] {
        if self.is_empty() { &mut [] } else { self.row(0, 0) }
    }

    /// Row `row` of head `head`, both counted within the block.
    #[inline(always)]
    pub fn row(&mut self, head: usize, row: usize) -> &mut [T] {
        assert!(head < self.heads.count && row < self.rows.count, "row {row} of head {head} is not in its block");
        // SAFETY: a place of this block, which is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(head * self.heads.step + row * self.rows.step), self.width) }
    }

    /// Rows `from..to` of head `head`, which must follow each other.
    #[inline(always)]
    pub fn rows(&mut self, head: usize, from: usize, to: usize) -> &mut [T] {
        let inside = head < self.heads.count && from <= to && to <= self.rows.count && self.rows.step == self.width;
        assert!(inside, "rows {from}..{to} of head {head} are not one piece of their block");
        // SAFETY: as above; rows are contiguous.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(head * self.heads.step + from * self.rows.step), (to - from) * self.width) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every value once, whatever the order of the axes, and none beside the tensor.
    #[test]
    fn blocks_cover_every_place_once() {
        let (b, h, t, width) = (2, 4, 5, 3);
        let axis = |count, step| Axis { count, step };
        let interleaved = Axes { batch: axis(b, t * 20), heads: axis(h, width), rows: axis(t, 20), width };
        let by_head = Axes { batch: axis(b, h * t * width), heads: axis(h, t * width), rows: axis(t, width), width };
        for axes in [interleaved, by_head] {
            let mut values = vec![0; b * t * 20];
            let blocks = Disjoint::new(&mut values, axes).blocks(2, &[0, 2, 2, 5]);
            assert_eq!(blocks.count, 2 * 2 * 3);
            blocks.par().enumerate().for_each(|(index, mut block)| {
                let rows = [2, 0, 3][index % 3];
                for head in 0..2 {
                    (0..rows).for_each(|row| block.row(head, row).iter_mut().for_each(|x| *x += 1 + index));
                }
            });
            let at = |b: usize, h: usize, t: usize| b * axes.batch.step + h * axes.heads.step + t * axes.rows.step;
            for (b, h, t) in (0..b).flat_map(|b| (0..h).flat_map(move |h| (0..t).map(move |t| (b, h, t)))) {
                let index = (b * 2 + h / 2) * 3 + if t < 2 { 0 } else { 2 };
                assert!(values[at(b, h, t)..][..width].iter().all(|&x| x == 1 + index), "{b} {h} {t}");
            }
            assert_eq!(values.iter().filter(|&&x| x > 0).count(), b * h * t * width);
        }
        let mut values = vec![0; 2 * 10];
        let one = |width| Axes { batch: axis(1, 20), heads: axis(1, width), rows: axis(2, 10), width };
        for (i, tensor) in Disjoint::side_by_side(&mut values, [one(5), one(3), one(2)]).into_iter().enumerate() {
            tensor.blocks(1, &[0, 2]).par().for_each(|mut block| (0..2).for_each(|row| block.row(0, row).fill(i)));
        }
        assert_eq!(values, [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2]);
    }

    #[test]
    fn what_overlaps_or_does_not_fit_is_refused() {
        let axis = |count, step| Axis { count, step };
        let axes = |head_step, width| Axes { batch: axis(1, 0), heads: axis(2, head_step), rows: axis(3, 8), width };
        let refused = |axes, len: usize| std::panic::catch_unwind(|| Disjoint::new(&mut vec![0; len], axes).axes).is_err();
        assert!(!refused(axes(4, 4), 24) && refused(axes(4, 4), 23) && refused(axes(3, 4), 24) && refused(axes(5, 4), 24));
        let outside = |head, row| {
            let mut values = vec![0; 24];
            let mut block = Disjoint::new(&mut values, axes(4, 4)).blocks(1, &[0, 1, 3]).block(0);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| block.row(head, row)[0] = 1)).is_err()
        };
        assert!(!outside(0, 0) && outside(1, 0) && outside(0, 1));
    }
}
