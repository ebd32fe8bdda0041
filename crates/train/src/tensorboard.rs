//! TensorBoard event files: protocol buffer records, each with masked CRC-32C checksums of its length and its bytes.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// An event file, open for appending.
#[derive(Debug)]
pub struct Events {
    file: File,
    path: PathBuf,
}

impl Events {
    /// Creates a file in `folder` and removes those of earlier sessions. Its first record marks a restart, so a
    /// running TensorBoard discards earlier points.
    pub fn create(folder: &Path, seconds: f64) -> Result<Events> {
        let old = std::fs::read_dir(folder).map_err(Error::io("list", folder))?.filter_map(|entry| entry.ok());
        let old: Vec<PathBuf> = old.filter(|entry| entry.file_name().to_string_lossy().contains(".tfevents.")).map(|e| e.path()).collect();
        for path in old {
            std::fs::remove_file(&path).map_err(Error::io("remove the older", &path))?;
        }
        // Nanoseconds: two sessions may start within one second.
        let path = folder.join(format!("events.out.tfevents.{:019}.termwise", (seconds * 1e9) as u64));
        let file = File::create(&path).map_err(Error::io("create", &path))?;
        let mut events = Events { file, path };
        let mut version = event(seconds, 0);
        bytes_field(&mut version, 3, b"brain.Event:2");
        let mut session = event(seconds, 0);
        // SessionLog { status: START }
        bytes_field(&mut session, 7, &[1 << 3, 1]);
        events.append(&[version, session])?;
        Ok(events)
    }

    /// Appends one point per tag.
    pub fn scalars(&mut self, seconds: f64, step: u64, values: &[(&str, f64)]) -> Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut point = Vec::new();
            bytes_field(&mut point, 1, tag.as_bytes());
            point.push(2 << 3 | 5);
            point.extend((*value as f32).to_le_bytes());
            bytes_field(&mut summary, 1, &point);
        }
        let mut event = event(seconds, step);
        bytes_field(&mut event, 5, &summary);
        self.append(&[event])
    }

    fn append(&mut self, events: &[Vec<u8>]) -> Result<()> {
        let mut bytes = Vec::new();
        for event in events {
            let length = (event.len() as u64).to_le_bytes();
            bytes.extend(length);
            bytes.extend(masked(crc32c(&length)).to_le_bytes());
            bytes.extend(event);
            bytes.extend(masked(crc32c(event)).to_le_bytes());
        }
        self.file.write_all(&bytes).map_err(Error::io("write", &self.path))
    }
}

/// Event { wall_time, step }
fn event(seconds: f64, step: u64) -> Vec<u8> {
    let mut event = vec![1 << 3 | 1];
    event.extend(seconds.to_le_bytes());
    event.push(2 << 3);
    varint(&mut event, step);
    event
}

fn bytes_field(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Bitwise CRC with the reflected Castagnoli polynomial: events are small and few.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| (0..8).fold(crc ^ byte as u32, |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_the_published_vectors() {
        // RFC 3720, B.4, and the usual check value.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn records_have_lengths_checksums_and_points() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("events.out.tfevents.1.old"), "x").expect("a file");
        let mut events = Events::create(folder.path(), 12.5).expect("an event file");
        events.scalars(13.0, 300, &[("loss", 2.5)]).expect("a point");
        let files: Vec<_> = std::fs::read_dir(folder.path()).expect("a list").map(|entry| entry.expect("an entry").path()).collect();
        assert_eq!(files.len(), 1, "events of earlier sessions are replaced");
        let bytes = std::fs::read(&files[0]).expect("the file");
        let (mut rest, mut records) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().expect("eight bytes")) as usize;
            assert_eq!(masked(crc32c(&rest[..8])).to_le_bytes(), rest[8..12]);
            let record = &rest[12..12 + length];
            assert_eq!(masked(crc32c(record)).to_le_bytes(), rest[12 + length..16 + length]);
            records.push(record.to_vec());
            rest = &rest[16 + length..];
        }
        let mut point = vec![0x09];
        point.extend(13.0f64.to_le_bytes());
        point.extend([0x10, 0xac, 0x02, 0x2a, 13, 0x0a, 11, 0x0a, 4]);
        point.extend(b"loss");
        point.push(0x15);
        point.extend(2.5f32.to_le_bytes());
        assert_eq!(records.len(), 3);
        assert_eq!(records[2], point);
    }
}
