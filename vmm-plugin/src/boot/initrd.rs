//! Whether an initrd is whole. A kernel that was handed half of one says so late or not at all, so it is looked through before the
//! guest starts: cpio archives and what mkinitramfs packs them with (zstd, lz4, xz, gzip). What is in it is the kernel's business.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};

use flate2::bufread::GzDecoder;
use units::limits::INITRD_UNPACKED_BYTES_MAX;

/// What is wrong with an initrd.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// There is nothing in it.
    #[error("is empty")]
    Empty,
    /// It begins as none does.
    #[error("is neither a cpio archive (newc) nor packed with zstd, lz4, xz, gzip, bzip2, lzma or lzo")]
    Unknown,
    /// Something is missing at its end.
    #[error("is truncated: it ends in the middle of {0}")]
    Truncated(&'static str),
    /// It cannot be read as what it says it is.
    #[error("is damaged: {0}")]
    Damaged(String),
    /// The file cannot be read.
    #[error("cannot be read")]
    Io(#[source] io::Error),
}

/// Looks through all of it, but for what only unpacking tells: that is done for gzip alone, which says nothing else.
///
/// # Errors
/// [`Broken`].
pub fn check(file: impl Read + Seek) -> Result<(), Broken> {
    let mut file = BufReader::new(file);
    let mut seen = false;
    loop {
        skip_zeros(&mut file).map_err(Broken::Io)?;
        let head = file.fill_buf().map_err(Broken::Io)?;
        match head {
            [] if seen => return Ok(()),
            [] => return Err(Broken::Empty),
            [b'0', b'7', b'0', b'7', b'0', b'1' | b'2', ..] => archive(&mut file)?,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => return zstd(&mut file).map_err(ended_in("a zstd frame")),
            [0x02, 0x21, 0x4c, 0x18, ..] => return lz4(&mut file).map_err(ended_in("an lz4 block")),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => return xz(&mut file),
            [0x1f, 0x8b, ..] => return gzip(file),
            [b'B', b'Z', b'h', ..] | [0x5d, 0, 0, ..] | [0x89, b'L', b'Z', b'O', ..] => return Ok(()),
            [b'0'] | [b'0', b'7', ..] => return Err(Broken::Truncated("its first header")),
            _ if seen => return Err(Broken::Damaged("something else follows an archive".into())),
            _ => return Err(Broken::Unknown),
        }
        seen = true;
    }
}

fn ended_in(what: &'static str) -> impl FnOnce(io::Error) -> Broken {
    move |error| match error.kind() {
        ErrorKind::UnexpectedEof => Broken::Truncated(what),
        ErrorKind::InvalidData | ErrorKind::InvalidInput => Broken::Damaged(error.to_string()),
        _ => Broken::Io(error),
    }
}

/// Archives may follow each other, with zeros between them.
fn skip_zeros(file: &mut impl BufRead) -> io::Result<()> {
    loop {
        let buffer = file.fill_buf()?;
        let zeros = buffer.iter().take_while(|byte| **byte == 0).count();
        let more = zeros > 0 && zeros == buffer.len();
        file.consume(zeros);
        if !more {
            return Ok(());
        }
    }
}

/// Entries up to the one that says that there are no more.
fn archive(file: &mut BufReader<impl Read + Seek>) -> Result<(), Broken> {
    const HEADER: usize = 110;
    const TRAILER: &[u8] = b"TRAILER!!!\0";
    let ended = || ended_in("an entry of a cpio archive");
    loop {
        let header: [u8; HEADER] = take(file).map_err(ended())?;
        let number = |at: usize| {
            let text = std::str::from_utf8(&header[at..at + 8]).ok();
            let number = text.and_then(|text| u64::from_str_radix(text, 16).ok());
            number.ok_or_else(|| Broken::Damaged("a cpio header has something else than numbers".into()))
        };
        if !header.starts_with(b"0707") {
            return Err(Broken::Damaged("no cpio header where one should be".into()));
        }
        let (content, name_bytes) = (number(54)?, number(94)?);
        let mut name = [0; TRAILER.len()];
        let known = name_bytes.min(TRAILER.len() as u64);
        file.read_exact(&mut name[..usize::try_from(known).expect("a few bytes")]).map_err(ended())?;
        let padded = (HEADER as u64 + name_bytes).next_multiple_of(4) - HEADER as u64;
        skip(file, padded - known + content.next_multiple_of(4)).map_err(ended())?;
        if name_bytes == TRAILER.len() as u64 && name == TRAILER {
            return Ok(());
        }
    }
}

/// One frame, as RFC 8878, section 3.1.1 has it: its header, blocks, and a checksum.
fn zstd(file: &mut BufReader<impl Read + Seek>) -> io::Result<()> {
    let [_, _, _, _, descriptor] = take(file)?;
    let single_segment = descriptor >> 5 & 1;
    let window = 1 - u64::from(single_segment);
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let content = [u64::from(single_segment), 2, 4, 8][usize::from(descriptor >> 6)];
    skip(file, window + dictionary + content)?;
    loop {
        let [low, middle, high] = take(file)?;
        let header = u32::from_le_bytes([low, middle, high, 0]);
        let repeated = header >> 1 & 3 == 1;
        skip(file, if repeated { 1 } else { u64::from(header >> 3) })?;
        if header & 1 == 1 {
            let checksum = u64::from(descriptor >> 2 & 1) * 4;
            return skip(file, checksum);
        }
    }
}

/// Blocks up to the end, in the form of old that kernels read; another stream may follow, or zeros.
fn lz4(file: &mut BufReader<impl Read + Seek>) -> io::Result<()> {
    const MAGIC: u32 = 0x184c_2102;
    while !file.fill_buf()?.is_empty() {
        let rest = file.fill_buf()?;
        if rest.len() < 4 && rest.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        match u32::from_le_bytes(take(file)?) {
            MAGIC => {}
            0 => return Ok(()),
            bytes => skip(file, bytes.into())?,
        }
    }
    Ok(())
}

/// A stream ends with two letters; zeros may follow.
fn xz(file: &mut BufReader<impl Read + Seek>) -> Result<(), Broken> {
    const END_LOOKED_AT: u64 = 4096;
    let bytes = file.seek(SeekFrom::End(0)).map_err(Broken::Io)?;
    file.seek(SeekFrom::Start(bytes.saturating_sub(END_LOOKED_AT))).map_err(Broken::Io)?;
    let mut end = Vec::new();
    file.read_to_end(&mut end).map_err(Broken::Io)?;
    let zeros = end.iter().rev().take_while(|byte| **byte == 0).count();
    if end[..end.len() - zeros].ends_with(b"YZ") { Ok(()) } else { Err(Broken::Truncated("an xz stream")) }
}

fn gzip(file: impl BufRead) -> Result<(), Broken> {
    let mut unpacked = GzDecoder::new(file).take(INITRD_UNPACKED_BYTES_MAX);
    io::copy(&mut unpacked, &mut io::sink()).map(drop).map_err(ended_in("a gzip stream"))
}

fn take<const N: usize>(file: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// All of these bytes are there. A file can be sought past its end, so the last one is read.
fn skip(file: &mut BufReader<impl Read + Seek>, bytes: u64) -> io::Result<()> {
    let Some(all_but_one) = bytes.checked_sub(1) else { return Ok(()) };
    let all_but_one = i64::try_from(all_but_one).map_err(|_| io::Error::from(ErrorKind::UnexpectedEof))?;
    file.seek_relative(all_but_one)?;
    take::<1>(file).map(drop)
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Write as _};

    use flate2::{Compression, write::GzEncoder};
    use proptest::prelude::*;

    use super::*;

    /// `echo hello | zstd`, and `xz`, and `lz4 -l`.
    const ZSTD: &[u8] = b"\x28\xb5\x2f\xfd\x04\x58\x31\x00\x00hello\n\x53\x88\xbd\x91";
    const LZ4: &[u8] = b"\x02\x21\x4c\x18\x07\x00\x00\x00\x60hello\n";

    fn entry(name: &str, content: &[u8]) -> Vec<u8> {
        let (name_bytes, bytes) = (name.len() + 1, content.len());
        let zeros = "0".repeat(8);
        let mut entry =
            format!("070701{}{bytes:08x}{}{name_bytes:08x}{zeros}", zeros.repeat(6), zeros.repeat(4));
        entry += name;
        let mut entry = entry.into_bytes();
        entry.push(0);
        entry.resize(entry.len().next_multiple_of(4), 0);
        entry.extend_from_slice(content);
        entry.resize(entry.len().next_multiple_of(4), 0);
        entry
    }

    fn archive(files: &[(String, Vec<u8>)]) -> Vec<u8> {
        let files = files.iter().map(|(name, content)| entry(name, content));
        files.chain([entry("TRAILER!!!", &[])]).flatten().collect()
    }

    fn gzipped(bytes: &[u8]) -> Vec<u8> {
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(bytes).unwrap();
        packed.finish().unwrap()
    }

    fn is_whole(bytes: &[u8]) -> bool {
        check(Cursor::new(bytes)).is_ok()
    }

    proptest! {
        #[test]
        fn an_archive_is_whole_and_no_part_of_it_is(
            files in prop::collection::vec(("[a-z/]{1,20}", prop::collection::vec(any::<u8>(), 0..60)), 0..5),
            cut in any::<prop::sample::Index>(),
        ) {
            let archive = archive(&files);
            prop_assert!(is_whole(&archive));
            // What is missing may be the zeros after the last name.
            let cut = cut.index(archive.len() - 3);
            prop_assert!(!is_whole(&archive[..cut]), "{cut} of {} bytes", archive.len());
        }

        #[test]
        fn what_is_packed_is_whole_and_no_part_of_it_is(cut in any::<prop::sample::Index>()) {
            for packed in [ZSTD.to_vec(), LZ4.to_vec(), gzipped(b"hello")] {
                let early = [archive(&[]), vec![0; 512], packed].concat();
                prop_assert!(is_whole(&early));
                let from = archive(&[]).len() + 512 + 6;
                let cut = from + cut.index(early.len() - from);
                prop_assert!(!is_whole(&early[..cut]), "{cut} of {} bytes", early.len());
            }
        }

        #[test]
        fn nothing_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), which in 0..4_usize) {
            let head: &[u8] = [&b"070701"[..], &ZSTD[..4], &LZ4[..4], &[0x1f, 0x8b]][which];
            let _ = check(Cursor::new([head, &bytes].concat()));
            let _ = check(Cursor::new(bytes));
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let said = |bytes: &[u8]| check(Cursor::new(bytes)).unwrap_err().to_string();
        assert!(said(b"#!/bin/sh").starts_with("is neither a cpio archive"));
        assert_eq!(
            said(&entry("init", b"hello")),
            "is truncated: it ends in the middle of an entry of a cpio archive"
        );
        assert_eq!(said(b"\xfd7zXZ\0...Y"), "is truncated: it ends in the middle of an xz stream");
        assert_eq!(
            said(&[archive(&[]), b"more".to_vec()].concat()),
            "is damaged: something else follows an archive"
        );
    }
}
