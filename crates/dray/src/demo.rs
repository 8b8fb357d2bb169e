//! `dray demo`: a server, two mounts and a comparison of files, in a temporary directory.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::args::DemoArgs;
use crate::error::{ErrorContext, Failure};
use crate::sandbox::Sandbox;
use crate::{interrupt, output};

/// Files of the checkpoint.
const FILES: usize = 8;
/// Files of the small-file part.
const SMALL_FILES: usize = 500;
/// Bytes of one call.
const CHUNK_BYTES: usize = 1 << 20;
/// Most that is written, MiB.
const MIB_MAX: usize = 1 << 20;

/// A directory that is removed in the end.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0); // in the directory of temporary files
    }
}

/// Runs it and tells how it went.
pub fn run(args: &DemoArgs) -> Result<(), Failure> {
    if !(FILES..=MIB_MAX).contains(&args.mib) {
        return Err(Failure::usage(format!("--mib is a number from {FILES} to {MIB_MAX}")));
    }
    interrupt::watch()?;
    let base = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let export = Temporary(base.join(format!("dray-demo-export-{}", std::process::id())));
    fs::create_dir(&export.0).doing(|| format!("cannot make {}", export.0.display()))?;
    let mut sandbox = Sandbox::serve("demo", &export.0)?;
    output::print_line(format_args!("serving {} and mounting it twice", export.0.display()))?;
    let one = sandbox.mount("one", "")?;
    let two = sandbox.mount("two", "")?;
    let per_file = args.mib / FILES * CHUNK_BYTES;
    let (time, sums) = timed(|| write_checkpoint(&one, per_file))?;
    report("written through the first mount", FILES * per_file, time)?;
    let (time, read) = timed(|| read_checkpoint(&two))?;
    report("read through the second mount", FILES * per_file, time)?;
    if sums != read {
        return Err(Failure::new("what was read is not what was written"));
    }
    output::print_line(format_args!("  all {FILES} files are the same on both sides"))?;
    let (time, ()) = timed(|| small_files(&one, &two))?;
    let rate = SMALL_FILES as f64 / time.as_secs_f64().max(1e-9);
    output::print_line(format_args!(
        "  {SMALL_FILES} files made, seen, renamed and removed: {rate:.0} a second"
    ))?;
    let left = fs::read_dir(&export.0).doing(|| "cannot list the export".into())?.count();
    if left != FILES {
        return Err(Failure::new(format!("{left} files are left in the export, not {FILES}")));
    }
    drop(sandbox);
    output::print_line(format_args!("unmounted, ended and cleaned up"))?;
    Ok(())
}

fn timed<T>(work: impl FnOnce() -> std::io::Result<T>) -> Result<(Duration, T), Failure> {
    let begin = Instant::now();
    let result = work();
    interrupt::check()?; // before a failure that it has caused is reported
    let value = result.doing(|| "the demonstration failed".into())?;
    Ok((begin.elapsed(), value))
}

fn report(what: &str, bytes: usize, time: Duration) -> Result<(), Failure> {
    let mib = bytes as f64 / f64::from(1 << 20);
    let rate = mib / time.as_secs_f64().max(1e-9);
    output::print_line(format_args!("  {mib:.0} MiB {what}: {rate:.0} MiB/s"))
}

/// Writes the files and answers their checksums.
fn write_checkpoint(dir: &Path, per_file: usize) -> std::io::Result<Vec<u64>> {
    let mut sums = Vec::new();
    for number in 0..FILES {
        let mut file = File::create(dir.join(format!("part-{number}")))?;
        let mut state = number as u64 + 1;
        let mut sum = SUM_BEGIN;
        let mut chunk = vec![0u8; CHUNK_BYTES];
        for _ in 0..per_file / CHUNK_BYTES {
            interrupt::check_io()?;
            fill(&mut chunk, &mut state);
            sum = add(sum, &chunk);
            file.write_all(&chunk)?;
        }
        file.sync_all()?;
        sums.push(sum);
    }
    Ok(sums)
}

fn read_checkpoint(dir: &Path) -> std::io::Result<Vec<u64>> {
    let mut sums = Vec::new();
    let mut chunk = vec![0u8; CHUNK_BYTES];
    for number in 0..FILES {
        let mut file = File::open(dir.join(format!("part-{number}")))?;
        let mut sum = SUM_BEGIN;
        loop {
            interrupt::check_io()?;
            let count = file.read(&mut chunk)?;
            if count == 0 {
                break;
            }
            sum = add(sum, &chunk[..count]);
        }
        sums.push(sum);
    }
    Ok(sums)
}

fn small_files(one: &Path, two: &Path) -> std::io::Result<()> {
    for number in 0..SMALL_FILES {
        interrupt::check_io()?;
        let (name, other) = (format!("small-{number}"), format!("renamed-{number}"));
        fs::write(one.join(&name), number.to_string())?;
        if fs::read(two.join(&name))? != number.to_string().as_bytes() {
            return Err(std::io::Error::other(format!("{name} is another at the second mount")));
        }
        fs::rename(two.join(&name), two.join(&other))?;
        fs::remove_file(one.join(&other))?;
    }
    Ok(())
}

/// Numbers that do not repeat, so that no part can pass for another (xorshift).
fn fill(chunk: &mut [u8], state: &mut u64) {
    for word in chunk.chunks_exact_mut(8) {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
}

const SUM_BEGIN: u64 = 0xcbf2_9ce4_8422_2325;

/// A checksum that depends on the order of what is added; parts are multiples of 8 bytes
/// but for the last.
fn add(sum: u64, bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).map(|part| {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        u64::from_le_bytes(word)
    });
    words.fold(sum, |sum, word| (sum.rotate_left(5) ^ word).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_notice_order_and_content() {
        let mut state = 7;
        let mut chunk = vec![0; 64];
        fill(&mut chunk, &mut state);
        let sum = add(SUM_BEGIN, &chunk);
        let mut changed = chunk.clone();
        changed.swap(3, 40);
        assert_ne!(sum, add(SUM_BEGIN, &changed));
        assert_eq!(sum, add(add(SUM_BEGIN, &chunk[..24]), &chunk[24..]));
    }
}
