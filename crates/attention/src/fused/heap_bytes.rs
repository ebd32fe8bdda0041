//! The number of heap bytes that scratch memory owns, counted from the list of its fields.

use crate::state::kv_cache::KvCache;
use crate::{Buffer, Rope};
use termwise_kernels::task_scratch::TaskScratch;

/// Memory whose size can be counted.
pub(in crate::fused) trait HeapBytes {
    /// Bytes allocated on the heap.
    fn heap_bytes(&self) -> usize;
}

impl HeapBytes for Buffer {
    fn heap_bytes(&self) -> usize {
        self.bytes()
    }
}

impl HeapBytes for TaskScratch {
    fn heap_bytes(&self) -> usize {
        self.bytes()
    }
}

impl HeapBytes for bool {
    fn heap_bytes(&self) -> usize {
        0
    }
}

impl HeapBytes for Vec<f64> {
    fn heap_bytes(&self) -> usize {
        size_of::<f64>() * self.capacity()
    }
}

impl HeapBytes for Vec<usize> {
    fn heap_bytes(&self) -> usize {
        size_of::<usize>() * self.capacity()
    }
}

impl HeapBytes for Vec<KvCache> {
    fn heap_bytes(&self) -> usize {
        self.iter().map(KvCache::bytes).sum()
    }
}

impl<T: HeapBytes, const N: usize> HeapBytes for [T; N] {
    fn heap_bytes(&self) -> usize {
        self.iter().map(HeapBytes::heap_bytes).sum()
    }
}

impl HeapBytes for Option<(Rope, usize)> {
    fn heap_bytes(&self) -> usize {
        self.as_ref().map_or(0, |(rope, _)| 8 * rope.frequencies().len())
    }
}

/// Declares the scratch memory of one stage. [`HeapBytes`] sums over the same list of fields, so no buffer is left uncounted.
macro_rules! scratch_memory {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Default)]
        pub(in crate::fused) struct $name {
            $($(#[$field_doc])* pub $field: $kind,)+
        }

        impl crate::fused::heap_bytes::HeapBytes for $name {
            fn heap_bytes(&self) -> usize {
                0 $(+ crate::fused::heap_bytes::HeapBytes::heap_bytes(&self.$field))+
            }
        }
    };
}

pub(in crate::fused) use scratch_memory;
