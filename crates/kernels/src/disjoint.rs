//! Disjoint mutable blocks of one tensor for parallel tasks.

use std::marker::PhantomData;

use rayon::prelude::*;

/// Length and stride of an axis.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// Number of elements.
    pub count: usize,
    /// Distance between two elements, in values.
    pub step: usize,
}

/// Layout of a tensor [batch, heads, rows, width]. The first three axes may be in any order in memory; values of a row are contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Axes {
    /// Batch rows, B.
    pub batch: Axis,
    /// H or G
    pub heads: Axis,
    /// T
    pub rows: Axis,
    /// Values per row.
    pub width: usize,
}

impl Axes {
    /// Number of values from the first to the last, or None if rows overlap or an axis is empty.
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

/// A mutable tensor that is divided into blocks.
pub struct Disjoint<'a, T> {
    at: *mut T,
    axes: Axes,
    values: PhantomData<&'a mut [T]>,
}

// SAFETY: a tensor is a unique borrow of its values, like `&mut [T]`.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// A tensor in a slice.
    ///
    /// # Panics
    /// If rows overlap or exceed the slice.
    pub fn new(values: &'a mut [T], axes: Axes) -> Disjoint<'a, T> {
        let fits = axes.extent().is_some_and(|extent| extent <= values.len());
        assert!(fits, "rows of {axes:?} overlap or exceed {} values", values.len());
        Disjoint { at: values.as_mut_ptr(), axes, values: PhantomData }
    }

    /// Three tensors whose rows are concatenated: each row of the slice is [first, second, third].
    ///
    /// # Panics
    /// If the layouts differ from that, or exceed the slice.
    pub fn side_by_side(values: &'a mut [T], all: [Axes; 3]) -> [Disjoint<'a, T>; 3] {
        let at = values.as_mut_ptr();
        let stride = all[0].rows.step;
        // Every row of every tensor is within a row of the slice.
        let fits = |axes: &Axes| {
            let is_row = axes.rows.step == stride && axes.heads.step == axes.width;
            let batch = axes.rows.count.checked_mul(stride).filter(|&step| is_row && step == axes.batch.step)?;
            batch.checked_mul(axes.batch.count).filter(|&len| len <= values.len())
        };
        let width = all.iter().try_fold(0, |sum: usize, axes| axes.heads.count.checked_mul(axes.width)?.checked_add(sum));
        let inside = all.iter().all(|axes| fits(axes).is_some()) && width.is_some_and(|width| width <= stride);
        assert!(inside, "{all:?} are not concatenated rows");
        let mut first = 0;
        all.map(|axes| {
            // Columns `first..first + heads·width` belong to this tensor only. The pointer wraps past the end of a slice without rows.
            let own = Disjoint { at: at.wrapping_add(first), axes, values: PhantomData };
            first += axes.heads.count * axes.width;
            own
        })
    }

    /// Blocks of `group` heads and of the rows between two consecutive `cuts`, in the order [batch, groups, cuts]. Cuts ascend from 0 to the number of
    /// rows.
    ///
    /// # Panics
    /// If the groups or the cuts do not divide the tensor.
    pub fn blocks(self, group: usize, cuts: &'a [usize]) -> Blocks<'a, T> {
        let whole = cuts.is_sorted() && cuts.first() == Some(&0) && cuts.last() == Some(&self.axes.rows.count);
        assert!(
            whole && group > 0 && self.axes.heads.count.is_multiple_of(group),
            "blocks of {group} heads and rows {cuts:?} of {:?}",
            self.axes
        );
        let count = self.axes.batch.count * (self.axes.heads.count / group) * (cuts.len() - 1);
        Blocks { at: self.at, axes: self.axes, group, cuts, count, offset: 0, values: PhantomData }
    }
}

/// The blocks of a tensor. [`Blocks::par`] iterates over them in parallel.
pub struct Blocks<'a, T> {
    at: *mut T,
    axes: Axes,
    group: usize,
    cuts: &'a [usize],
    count: usize,
    offset: usize,
    values: PhantomData<&'a mut [T]>,
}

// SAFETY: blocks are a unique borrow of their values, like `&mut [T]`.
unsafe impl<T: Send> Send for Blocks<'_, T> {}
// SAFETY: a shared reference gives access to values only within `par`, which consumes the blocks and creates each once.
unsafe impl<T: Send> Sync for Blocks<'_, T> {}

impl<'a, T> Blocks<'a, T> {
    /// `count` empty blocks, for a tensor that is not used.
    pub fn empty(count: usize) -> Blocks<'a, T> {
        let none = Axis { count: 0, step: 0 };
        let axes = Axes { batch: none, heads: Axis { count: 1, step: 0 }, rows: none, width: 0 };
        Blocks { at: std::ptr::NonNull::dangling().as_ptr(), axes, group: 1, cuts: &[0, 0], count, offset: 0, values: PhantomData }
    }

    /// A slice divided into `count` equal parts; empty parts if the slice is empty.
    ///
    /// # Panics
    /// If `count` is 0 and the slice is not empty.
    pub fn pieces(values: &'a mut [T], count: usize) -> Blocks<'a, T> {
        if values.is_empty() {
            return Blocks::empty(count);
        }
        let width = values.len() / count;
        let one = Axis { count: 1, step: 0 };
        Disjoint::new(values, Axes { batch: Axis { count, step: width }, heads: one, rows: one, width }).blocks(1, &[0, 1])
    }

    /// The same blocks with the order of the cuts rotated by `offset`.
    pub fn rotated(self, offset: usize) -> Blocks<'a, T> {
        let offset = offset % (self.cuts.len() - 1);
        Blocks { offset, ..self }
    }

    /// A parallel iterator over the blocks.
    pub fn par(self) -> impl IndexedParallelIterator<Item = Block<'a, T>>
    where
        T: Send,
    {
        (0..self.count).into_par_iter().map(move |index| self.block(index))
    }

    fn block(&self, index: usize) -> Block<'a, T> {
        let parts = self.cuts.len() - 1;
        let (rest, part) = (index / parts, (index % parts + self.offset) % parts);
        let groups = self.axes.heads.count / self.group;
        let (b, g) = (rest / groups, rest % groups);
        let first = b * self.axes.batch.step + g * self.group * self.axes.heads.step + self.cuts[part] * self.axes.rows.step;
        let rows = Axis { count: self.cuts[part + 1] - self.cuts[part], ..self.axes.rows };
        let heads = Axis { count: self.group, ..self.axes.heads };
        // SAFETY: the start is within the tensor, whose extent was checked, or one past its end if the block is empty.
        Block { at: unsafe { self.at.add(first) }, heads, rows, width: self.axes.width, values: PhantomData }
    }
}

/// Some heads and rows of a tensor, borrowed mutably.
pub struct Block<'a, T> {
    at: *mut T,
    heads: Axis,
    rows: Axis,
    width: usize,
    values: PhantomData<&'a mut [T]>,
}

// SAFETY: a block is a unique borrow of its values, like `&mut [T]`.
unsafe impl<T: Send> Send for Block<'_, T> {}

impl<T> Block<'_, T> {
    /// Whether the block has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.count == 0
    }

    /// Reborrows the block.
    pub fn reborrow(&mut self) -> Block<'_, T> {
        Block { values: PhantomData, ..*self }
    }

    /// The first row as a slice; empty if the block is empty.
    pub fn piece(&mut self) -> &mut [T] {
        if self.is_empty() { &mut [] } else { self.row(0, 0) }
    }

    /// Row `row` of head `head`, both relative to the block.
    ///
    /// # Panics
    /// If the block has no such row.
    #[inline(always)]
    pub fn row(&mut self, head: usize, row: usize) -> &mut [T] {
        assert!(head < self.heads.count && row < self.rows.count, "row {row} of head {head} is not in the block");
        // SAFETY: by the assertion the row is within this block, which is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(head * self.heads.step + row * self.rows.step), self.width) }
    }

    /// Rows `from..to` of head `head`, which must be contiguous.
    ///
    /// # Panics
    /// If rows are not contiguous, or the block does not have them.
    #[inline(always)]
    pub fn rows(&mut self, head: usize, from: usize, to: usize) -> &mut [T] {
        let inside = head < self.heads.count && from <= to && to <= self.rows.count && self.rows.step == self.width;
        assert!(inside, "rows {from}..{to} of head {head} are not contiguous rows of the block");
        // SAFETY: by the assertion the rows are contiguous and within this block, which is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(head * self.heads.step + from * self.rows.step), (to - from) * self.width) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For every order of the axes, blocks cover every value of the tensor once and none outside.
    #[test]
    fn blocks_cover_every_value_once() {
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

    /// A rotation visits every block once, also if the offset is large enough to overflow a sum.
    #[test]
    fn rotated_blocks_cover_every_value_once() {
        for offset in [0, 1, 2, 3, 7, usize::MAX] {
            let mut values = vec![0; 6];
            let axes =
                Axes { batch: Axis { count: 1, step: 0 }, heads: Axis { count: 1, step: 0 }, rows: Axis { count: 3, step: 2 }, width: 2 };
            let blocks = Disjoint::new(&mut values, axes).blocks(1, &[0, 1, 2, 3]).rotated(offset);
            blocks.par().enumerate().for_each(|(index, mut block)| block.row(0, 0).iter_mut().for_each(|x| *x += 1 + index));
            let expected: Vec<usize> = (0..6).map(|i| 1 + (i / 2 + 3 - offset % 3) % 3).collect();
            assert_eq!(values, expected, "offset {offset}");
        }
    }

    #[test]
    fn overlapping_or_too_long_layouts_are_refused() {
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
        let concatenated = |widths: [usize; 3], len: usize| {
            let one = |width| Axes { batch: axis(1, 20), heads: axis(1, width), rows: axis(2, 10), width };
            std::panic::catch_unwind(|| Disjoint::side_by_side(&mut vec![0; len], widths.map(one)).map(|tensor| tensor.axes)).is_ok()
        };
        assert!(concatenated([5, 3, 2], 20) && !concatenated([5, 3, 3], 20) && !concatenated([5, 3, 2], 19));
    }
}
