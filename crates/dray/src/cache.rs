//! `dray cache`: files of a mount on the local disk.

use std::fs::{self, File};
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use dray_cache::{CacheUse, STATE_XATTR};
use dray_client::DirtyLogSummary;
use serde_json::{Value, json};

use crate::args::{CacheCommand, CacheDir, CacheFiles};
use crate::error::{ErrorContext, Failure};
use crate::mount::options::dirty_dir;
use crate::output;
use crate::target_disks::xattrs;

/// Read at once when a file is fetched.
const READ_BYTES: usize = 1 << 20;
/// A file is read again for what the cache did not keep.
const FETCHES_MAX: usize = 3;
/// What was read is stored a little later.
const STORE_WAIT: Duration = Duration::from_millis(300);
/// So many files that are not kept are named one by one, without `--json`.
const COMPLAINTS_MAX: usize = 50;
/// Why a file is not kept if no error says so.
const NOT_KEPT: &str = "it may be open for writing or have changed within the last minute, \
                        cache_rules may leave it out, or the cache is full";
/// Between two lines of progress.
const SHOW_EVERY: Duration = Duration::from_millis(500);

/// Carries it out. Errors: a path is in no mount with a cache, or cannot be read.
pub fn run(command: &CacheCommand) -> Result<(), Failure> {
    match command {
        CacheCommand::Attach(files) => attach(files),
        CacheCommand::Detach(files) => each(files, |path| order(path, b"drop")),
        CacheCommand::State(files) => each(files, |_| Ok(())),
        CacheCommand::Pin(files) => each(files, |path| order(path, b"pin")),
        CacheCommand::Unpin(files) => each(files, |path| order(path, b"unpin")),
        CacheCommand::List(cache) => list(cache),
        CacheCommand::Stats(cache) => stats(cache),
        CacheCommand::Clear(cache) => clear(cache),
    }
}

/// How much of a file is there.
struct FileState {
    resident_bytes: u64,
    size_bytes: u64,
    pinned: bool,
}

impl FileState {
    fn json(&self, path: &Path) -> Value {
        json!({
            "path": path.display().to_string(),
            "resident_bytes": self.resident_bytes,
            "size_bytes": self.size_bytes,
            "pinned": self.pinned,
        })
    }
}

fn no_cache(path: &Path) -> Failure {
    Failure::new(format!(
        "{}: it is in no mount with a cache (mount it with -o leases=yes,cache=DIR)",
        path.display()
    ))
}

fn state(path: &Path) -> Result<FileState, Failure> {
    let what = || format!("cannot ask for the state of {}", path.display());
    let text = match xattrs::get(path, STATE_XATTR) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => None,
        text => text.doing(what)?,
    };
    let text = text.and_then(|text| String::from_utf8(text).ok()).ok_or_else(|| no_cache(path))?;
    let word = |key: &str| {
        text.split(' ')
            .find_map(|word| word.strip_prefix(key)?.strip_prefix('=').map(str::to_owned))
    };
    let number = |key| word(key).and_then(|number| number.parse().ok());
    match (number("resident"), number("size"), word("pinned")) {
        (Some(resident_bytes), Some(size_bytes), Some(pinned)) => {
            Ok(FileState { resident_bytes, size_bytes, pinned: pinned == "yes" })
        }
        _ => Err(no_cache(path)), // some other program's attribute
    }
}

fn order(path: &Path, order: &[u8]) -> Result<(), Failure> {
    state(path)?; // elsewhere the order would become an attribute of the file
    xattrs::set(path, STATE_XATTR, order)
        .doing(|| format!("cannot change what the cache does with {}", path.display()))
}

/// The files that are meant, without links.
fn files_of(files: &CacheFiles) -> Result<Vec<PathBuf>, Failure> {
    let mut found = Vec::new();
    let mut left = files.paths.clone();
    while let Some(path) = left.pop() {
        let kind = fs::symlink_metadata(&path).doing(|| path.display().to_string())?.file_type();
        if kind.is_file() {
            found.push(path);
        } else if kind.is_dir() && files.recursive {
            let list = fs::read_dir(&path).doing(|| path.display().to_string())?;
            for entry in list {
                left.push(entry.doing(|| path.display().to_string())?.path());
            }
        } else if kind.is_dir() {
            let path = path.display();
            return Err(Failure::usage(format!("{path} is a directory: say --recursive (-r)")));
        }
    }
    found.sort();
    Ok(found)
}

fn say(files: &CacheFiles, path: &Path, state: &FileState) -> Result<(), Failure> {
    if files.json {
        return output::print_json(&state.json(path));
    }
    let pinned = if state.pinned { ", pinned" } else { "" };
    let FileState { resident_bytes, size_bytes, .. } = state;
    let path = path.display();
    output::print_line(format!("{path}: {resident_bytes} of {size_bytes} bytes{pinned}"))
}

fn each(files: &CacheFiles, change: impl Fn(&Path) -> Result<(), Failure>) -> Result<(), Failure> {
    for path in files_of(files)? {
        change(&path)?;
        say(files, &path, &state(&path)?)?;
    }
    Ok(())
}

fn attach(files: &CacheFiles) -> Result<(), Failure> {
    let list = files_of(files)?;
    let shown = !files.json && std::io::stderr().is_terminal();
    let (mut kept, mut complaints, mut last) = (0, 0, Instant::now());
    for (index, path) in list.iter().enumerate() {
        let fetched = fetch(path);
        let trouble = trouble(path, &fetched);
        kept += usize::from(trouble.is_none());
        if files.json {
            output::print_json(&fetched_json(path, fetched))?;
        } else if let Some(trouble) = trouble {
            complaints += 1;
            if complaints <= COMPLAINTS_MAX {
                output::complain(trouble);
            }
        }
        if shown && last.elapsed() > SHOW_EVERY {
            last = Instant::now();
            eprint!("\r{} of {} files", index + 1, list.len());
        }
    }
    if shown {
        eprint!("\r\x1b[K");
    }
    if !files.json {
        output::print_line(format!("{kept} of {} files are in the cache, whole", list.len()))?;
    }
    if kept < list.len() {
        return Err(Failure::new(format!(
            "{} files are not in the cache as a whole; `--json` says why of each",
            list.len() - kept
        )));
    }
    Ok(())
}

/// Why a file is not in the cache as a whole. None: it is.
fn trouble(path: &Path, fetched: &Result<FileState, Failure>) -> Option<String> {
    match fetched {
        Ok(state) if state.resident_bytes == state.size_bytes => None,
        Ok(FileState { resident_bytes, size_bytes, .. }) => Some(format!(
            "{}: {resident_bytes} of {size_bytes} bytes are in the cache; {NOT_KEPT}",
            path.display()
        )),
        Err(failure) => Some(failure.message.clone()),
    }
}

fn fetched_json(path: &Path, fetched: Result<FileState, Failure>) -> Value {
    let trouble = trouble(path, &fetched);
    let mut json = match fetched {
        Ok(state) => state.json(path),
        Err(_) => json!({ "path": path.display().to_string() }),
    };
    if let Some(trouble) = trouble {
        json["error"] = trouble.into();
    }
    json
}

/// Reads a file until all of it is there, or the cache does not keep it.
fn fetch(path: &Path) -> Result<FileState, Failure> {
    let what = || format!("cannot read {}", path.display());
    let mut known = state(path)?;
    for _ in 0..FETCHES_MAX {
        if known.resident_bytes == known.size_bytes {
            break;
        }
        let mut file = File::open(path).doing(what)?;
        let mut buffer = vec![0; READ_BYTES];
        while file.read(&mut buffer).doing(what)? > 0 {}
        drop(file);
        let begin = Instant::now();
        loop {
            known = state(path)?;
            if known.resident_bytes == known.size_bytes || begin.elapsed() > STORE_WAIT {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(known)
}

/// So that no other directory is taken for a cache, of which files might be removed.
fn check(cache: &CacheDir) -> Result<(), Failure> {
    let dir = cache.dir.display();
    let is_cache =
        dray_cache::is_cache(&cache.dir).doing(|| format!("cannot read the cache {dir}"))?;
    match is_cache {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "{dir} is not the cache of a mount: say the directory that `cache=` names"
        ))),
    }
}

fn entries(cache: &CacheDir) -> Result<Vec<CacheUse>, Failure> {
    check(cache)?;
    let mut list = dray_cache::list(&cache.dir)
        .doing(|| format!("cannot read the cache {}", cache.dir.display()))?;
    list.sort_by_key(|entry| std::cmp::Reverse(entry.used));
    Ok(list)
}

/// What mounts have there that the server does not have.
fn dirty(cache: &CacheDir) -> Result<Vec<DirtyLogSummary>, Failure> {
    let dir = dirty_dir(&cache.dir);
    dray_client::dirty_log_summaries(&dir).doing(|| format!("cannot read {}", dir.display()))
}

fn list_dirty(cache: &CacheDir) -> Result<(), Failure> {
    for DirtyLogSummary { dir, export, files, bytes, is_in_use } in dirty(cache)? {
        if cache.json {
            output::print_json(&json!({
                "log": dir.display().to_string(),
                "export": export,
                "files": files,
                "dirty_bytes": bytes,
                "in_use": is_in_use,
            }))?;
            continue;
        }
        let of = if is_in_use { "a mount that is there" } else { "a mount that is gone" };
        output::print_line(format!(
            "{}: {bytes} bytes of {files} files of {export} are not at the server, of {of}",
            dir.display()
        ))?;
    }
    Ok(())
}

fn list(cache: &CacheDir) -> Result<(), Failure> {
    for entry in entries(cache)? {
        let used_s = entry.used.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let (key, map) = (entry.map.key, &entry.map);
        if cache.json {
            output::print_json(&json!({
                "file_system": format!("{:032x}", key.fs.0),
                "ino": key.id.ino,
                "generation": key.id.generation,
                "size_bytes": key.version.size,
                "resident_bytes": map.resident_bytes(),
                "disk_bytes": entry.disk_bytes,
                "pinned": map.pinned,
                "used_s": used_s,
            }))?;
            continue;
        }
        let pinned = if map.pinned { ", pinned" } else { "" };
        let (resident, size, ino) = (map.resident_bytes(), key.version.size, key.id.ino);
        output::print_line(format!(
            "inode {ino} of {:032x}: {resident} of {size} bytes{pinned}",
            key.fs.0
        ))?;
    }
    list_dirty(cache)
}

fn stats(cache: &CacheDir) -> Result<(), Failure> {
    let list = entries(cache)?;
    let sum = |of: fn(&CacheUse) -> u64| list.iter().map(of).sum::<u64>();
    let resident = sum(|entry| entry.map.resident_bytes());
    let disk = sum(|entry| entry.disk_bytes);
    let pinned = sum(|entry| u64::from(entry.map.pinned));
    let dirty = dirty(cache)?;
    let dirty_bytes = dirty.iter().map(|log| log.bytes).sum::<u64>();
    let is_left = |log: &&DirtyLogSummary| !log.is_in_use && log.bytes > 0;
    let left_bytes = dirty.iter().filter(is_left).map(|log| log.bytes).sum::<u64>();
    if cache.json {
        return output::print_json(&json!({
            "dirty_bytes": dirty_bytes, "left_bytes": left_bytes,
            "files": list.len(), "resident_bytes": resident, "disk_bytes": disk, "pinned": pinned,
        }));
    }
    let files = list.len();
    output::print_line(format!(
        "{files} files, {pinned} of them pinned; {resident} bytes, which take {disk} bytes of the disk"
    ))?;
    if dirty_bytes > 0 {
        output::print_line(format!(
            "{dirty_bytes} bytes are not at the server; {left_bytes} of these belong to mounts that are gone, and \
             are written when their export is mounted again"
        ))?;
    }
    Ok(())
}

fn clear(cache: &CacheDir) -> Result<(), Failure> {
    check(cache)?;
    let dropped = dray_cache::clear(&cache.dir)
        .doing(|| format!("cannot clear the cache {}", cache.dir.display()))?;
    match cache.json {
        true => output::print_json(&json!({ "dropped": dropped })),
        false => output::print_line(format!("{dropped} files dropped")),
    }
}
