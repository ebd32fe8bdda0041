//! Checks sizes in Parquet files before the parquet crate allocates memory from them: page sizes, number of dictionary entries, and number of
//! children of a column group. A failed allocation would terminate the process.
//!
//! These are in structs of Thrift's compact protocol. A struct is a list of fields, each with a byte for its type and the difference of its id to
//! the previous one, then its value; it ends with a zero byte. Invalid data are not reported here: the crate's own reader, which runs
//! next, also rejects them.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};

/// Maximum size of a page relative to its file, unless it is at most [`SMALL_PAGE`].
const MULTIPLE: u64 = 1024;
/// Size in bytes that any page may have.
const SMALL_PAGE: u64 = 1 << 20;
/// Maximum nesting of column groups and of Thrift values.
const MAX_NESTING: usize = 64;

/// Rejects a footer whose columns are nested too deeply, or whose groups have more children than the file has bytes.
pub(super) fn check_footer(file: &File, bytes: u64) -> Result<(), String> {
    let Some(mut footer) = footer(file, bytes) else { return Ok(()) };
    // Remaining children of each enclosing group, and children of the current element.
    let (mut open, mut children, mut problem) = (Vec::new(), 0, None);
    footer.structure(0, &mut Vec::new(), &mut |path, number| match (path, number) {
        // FileMetaData.schema.num_children
        ([2, 5], Some(count)) => children = count,
        ([2], None) => {
            while open.last() == Some(&0) {
                open.pop();
            }
            if let Some(left) = open.last_mut() {
                *left -= 1;
            }
            let count = std::mem::take(&mut children);
            if count > bytes as i64 {
                problem = Some(format!("a group claims {count} columns, more than the file has bytes; it is damaged"));
            } else if count > 0 && open.len() < MAX_NESTING {
                open.push(count);
            } else if count > 0 {
                problem = Some(format!("groups of columns are nested more than {MAX_NESTING} deep; write it with fewer"));
            }
        }
        _ => {}
    });
    problem.map_or(Ok(()), Err)
}

/// Rejects a page whose stated size is too large for its file, or that has more strings than its bytes allow. `start` and `length` are those of a
/// column chunk, which may be compressed.
pub(super) fn check_pages(file: &File, bytes: u64, (start, length): (u64, u64), compressed: bool) -> Result<(), String> {
    let most = bytes.saturating_mul(MULTIPLE).max(SMALL_PAGE);
    let Some(mut chunk) = Input::new(file, start, length) else { return Ok(()) };
    while chunk.left > 0 {
        let (mut held, mut stored, mut texts) = (0, 0, 0);
        let header = chunk.structure(0, &mut Vec::new(), &mut |path, number| match (path, number) {
            // PageHeader.uncompressed_page_size and compressed_page_size
            ([2], Some(size)) => held = size,
            ([3], Some(size)) => stored = size,
            // PageHeader.dictionary_page_header.num_values
            ([7, 1], Some(count)) => texts = count,
            _ => {}
        });
        if u64::try_from(held).is_ok_and(|held| held > most) {
            let ways = "it is damaged, or must be written with smaller pages";
            return Err(format!("a page claims to contain {held} bytes, more than {MULTIPLE} times the file's {bytes}; {ways}"));
        }
        // Each string of a dictionary has four bytes for its length.
        let room = if compressed { held } else { stored };
        if texts > room / 4 {
            return Err(format!("a dictionary claims {texts} strings in {room} bytes; it is damaged"));
        }
        if header.and_then(|()| chunk.skip(u64::try_from(stored).ok()?)).is_none() {
            break;
        }
    }
    Ok(())
}

/// The metadata before the last eight bytes, which are its length and `PAR1`.
fn footer(file: &File, bytes: u64) -> Option<Input> {
    let mut end = Input::new(file, bytes.checked_sub(8)?, 8)?;
    let mut length = [0; 4];
    end.file.read_exact(&mut length).ok()?;
    let length = u32::from_le_bytes(length).into();
    Input::new(file, (bytes - 8).checked_sub(length)?, length)
}

/// Bytes of a range of a file.
struct Input {
    file: BufReader<File>,
    left: u64,
}

/// Callback for every integer in a struct, and for the end of each struct (`None`). The path consists of the ids of the enclosing fields,
/// without list indices.
type See<'a> = dyn FnMut(&[i16], Option<i64>) + 'a;

/// `None` means the end of the range, or invalid Thrift.
impl Input {
    fn new(file: &File, start: u64, length: u64) -> Option<Input> {
        let mut file = BufReader::new(file.try_clone().ok()?);
        file.seek(SeekFrom::Start(start)).ok()?;
        Some(Input { file, left: length })
    }

    fn byte(&mut self) -> Option<u8> {
        self.left = self.left.checked_sub(1)?;
        let mut byte = [0];
        self.file.read_exact(&mut byte).ok()?;
        Some(byte[0])
    }

    fn skip(&mut self, count: u64) -> Option<()> {
        self.left = self.left.checked_sub(count)?;
        self.file.seek_relative(count.try_into().ok()?).ok()
    }

    /// Variable-length integer: seven bits per byte, lowest first.
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    /// Zigzag encoding: 0, −1, 1, −2, …
    fn signed(&mut self) -> Option<i64> {
        self.varint().map(|value| (value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn structure(&mut self, depth: usize, path: &mut Vec<i16>, see: &mut See) -> Option<()> {
        let mut id = 0i16;
        loop {
            let head = self.byte()?;
            if head == 0 {
                see(path, None);
                return Some(());
            }
            id = match head >> 4 {
                0 => self.signed()?.try_into().ok()?,
                distance => id.checked_add(distance.into())?,
            };
            path.push(id);
            // A boolean field has its value in its type.
            if !matches!(head & 15, 1 | 2) {
                self.value(head & 15, depth + 1, path, see)?;
            }
            path.pop();
        }
    }

    fn value(&mut self, kind: u8, depth: usize, path: &mut Vec<i16>, see: &mut See) -> Option<()> {
        if depth > MAX_NESTING {
            return None;
        }
        match kind {
            // Booleans in lists, and bytes.
            1..=3 => self.skip(1),
            4..=6 => {
                let number = self.signed()?;
                see(path, Some(number));
                Some(())
            }
            7 => self.skip(8),
            8 => {
                let length = self.varint()?;
                self.skip(length)
            }
            // Lists and sets. Every element takes at least a byte, so a false count ends with the range.
            9 | 10 => {
                let head = self.byte()?;
                let count = if head >> 4 == 15 { self.varint()? } else { (head >> 4).into() };
                (0..count).try_for_each(|_| self.value(head & 15, depth + 1, path, see))
            }
            11 => {
                let count = self.varint()?;
                let kinds = if count == 0 { 0 } else { self.byte()? };
                (0..count).try_for_each(|_| {
                    self.value(kinds >> 4, depth + 1, path, see)?;
                    self.value(kinds & 15, depth + 1, path, see)
                })
            }
            12 => self.structure(depth, path, see),
            13 => self.skip(16),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(content: &[u8]) -> (File, u64) {
        use std::io::Write;
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(content).expect("a file");
        (file, content.len() as u64)
    }

    fn varint(mut value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while value >= 0x80 {
            bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        bytes.push(value as u8);
        bytes
    }

    /// An i32 with the next field id.
    fn number(value: i64) -> Vec<u8> {
        let mut bytes = vec![0x15];
        bytes.extend(varint(((value << 1) ^ (value >> 63)) as u64));
        bytes
    }

    /// PageHeader { type, uncompressed_page_size, compressed_page_size, data_page_header } with a value of every type, and the page.
    fn page(held: i64, stored: usize) -> Vec<u8> {
        let inner =
            [&[0x1c][..], &number(7), &[0x11, 0x12, 0x13, 9, 0x17], &[0; 8], &[0x18, 3, 1, 2, 3, 0x19, 0x21, 1, 0, 0x1b, 1, 0x35, 9, 8]];
        let more = [&inner.concat()[..], &[0x1d], &[0; 16], &[0x09, 0x40, 0xf5, 2, 1, 2, 0, 0]].concat();
        [number(0), number(held), number(stored as i64), more, vec![0xaa; stored]].concat()
    }

    #[test]
    fn page_sizes_are_bounded_by_the_file_size() {
        let check = |content: &[u8]| {
            let (file, bytes) = file(content);
            check_pages(&file, bytes, (0, bytes), true)
        };
        let small = SMALL_PAGE as i64;
        assert_eq!(check(&[page(small, 100), page(small, 5)].concat()), Ok(()), "any page may be small");
        let error = check(&[page(small, 100), page(small + 1, 5)].concat()).expect_err("the second page is too large");
        assert!(error.contains("claims to contain 1048577 bytes") && error.contains("smaller pages"), "{error}");
        let large = [page(i32::MAX.into(), 3 << 20), page(1, 1)].concat();
        assert_eq!(check(&large), Ok(()), "of a file this large");
        // A page's dictionary header is field 7.
        let dictionary = |held, texts| [&number(2)[..], &number(held), &number(9), &[0x4c], &number(texts), &[0, 0], &[0xaa; 9]].concat();
        assert_eq!(check(&dictionary(400, 100)), Ok(()));
        assert!(check(&dictionary(400, 101)).expect_err("too many strings").contains("101 strings in 400 bytes"));
        let (plain, bytes) = file(&dictionary(400, 3));
        assert!(check_pages(&plain, bytes, (0, bytes), false).expect_err("nine bytes that are not compressed").contains("in 9 bytes"));
        // Other data is passed to the reader.
        for wrong in [&[][..], &[0xff; 50], &[0x15], &[0x19; 5000], &number(0)] {
            assert_eq!(check(wrong), Ok(()));
        }
    }

    /// A footer whose schema elements have these numbers of children.
    fn schema(children: &[i64]) -> Vec<u8> {
        let elements =
            children.iter().flat_map(|&count| [&[0x48, 1, b'x'][..], &if count == 0 { vec![] } else { number(count) }, &[0]].concat());
        let list = [&[0x15, 2, 0x19, 0xfc][..], &varint(children.len() as u64)].concat();
        let mut bytes: Vec<u8> = list.into_iter().chain(elements).chain([0]).collect();
        bytes.extend((bytes.len() as u32).to_le_bytes());
        bytes.extend(b"PAR1");
        bytes
    }

    #[test]
    fn column_nesting_and_child_counts_are_bounded() {
        let check = |children: &[i64]| {
            let (file, bytes) = file(&schema(children));
            check_footer(&file, bytes)
        };
        assert_eq!(check(&[2, 0, 1, 0]), Ok(()));
        // Siblings, not nested.
        assert_eq!(check(&[&[200][..], &[1, 0].repeat(200)].concat()), Ok(()));
        assert_eq!(check(&[&[1].repeat(MAX_NESTING)[..], &[0]].concat()), Ok(()));
        assert!(check(&[&[1].repeat(MAX_NESTING + 1)[..], &[0]].concat()).expect_err("too deep").contains("64 deep"));
        assert!(check(&[2, 0, i32::MAX.into(), 0]).expect_err("too many").contains("2147483647 columns"));
        for (file, bytes) in [file(b""), file(b"PAR1"), file(b"PAR1\xff\xff\xff\xffPAR1")] {
            assert_eq!(check_footer(&file, bytes), Ok(()));
        }
    }
}
