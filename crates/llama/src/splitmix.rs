//! SplitMix64 (Steele, Lea and Flood 2014) with a key: numbers that are computed from their index. The same on every machine.

/// The finalizer: every bit of the result depends on all bits of z.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 53 random bits, element `index` of the sequence of this key.
pub fn bits(key: u64, index: u64) -> u64 {
    mix(key.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15))) >> 11
}

/// What 53 bits stay below.
pub const RANGE: f64 = (1u64 << 53) as f64;
