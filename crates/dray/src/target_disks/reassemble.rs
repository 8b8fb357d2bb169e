//! `dray reassemble`: plain files out of the disks of a projection.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use dray_layers::placement::ObjectId;
use serde_json::json;

use super::{Progress, TargetDisks, directories, object_of, shown, xattrs};
use crate::args::ReassembleArgs;
use crate::error::{ErrorContext, Failure};
use crate::output;
use crate::serve::own_disk;

const COPY_BYTES: usize = 1 << 20;

/// What was made so far.
#[derive(Default)]
struct RestoredCounts {
    files: u64,
    directories: u64,
    others: u64,
    bytes: u64,
    /// Files of which data are at no disk, or are at no disk maybe: what is said of them.
    incomplete: Vec<String>,
    sparse: Vec<String>,
}

impl RestoredCounts {
    fn note_absence(&mut self, disks: &TargetDisks, stub: &Path) -> Result<(), Failure> {
        let Some(object) = object_of(stub)? else { return Ok(()) };
        let Some(absence) = disks.absence(object)? else { return Ok(()) };
        let said = format!("{}: {}", stub.display(), absence.text(disks));
        match absence.is_damage() {
            true => self.incomplete.push(said),
            false => self.sparse.push(said),
        }
        Ok(())
    }
}

/// Makes the tree at a directory that is not there yet. Errors: the first that occurs, or files lack data,
/// which are made all the same; what was made stays.
pub fn run(args: &ReassembleArgs) -> Result<(), Failure> {
    let (which, to) = destination(args)?;
    let disks = TargetDisks::open(&directories(which, args.projections.as_deref())?)?;
    let names = disks.names();
    fs::create_dir(to).doing(|| format!("cannot make {}", to.display()))?;
    let (mut made, mut progress) = (RestoredCounts::default(), Progress::new(args.json));
    // The first path of each file with several, by its inode number; directories get their times last.
    let mut linked: HashMap<u64, PathBuf> = HashMap::new();
    let root = fs::symlink_metadata(&names).doing(|| shown(&names))?;
    let mut directories = vec![(names.clone(), to.to_owned(), root)];
    disks.walk_names(|from, seen| {
        let below = from.strip_prefix(&names).unwrap_or(from);
        let to = to.join(below);
        let first = (seen.nlink() > 1 && !seen.is_dir()).then(|| linked.get(&seen.ino())).flatten();
        if let Some(first) = first {
            return fs::hard_link(first, &to).doing(|| shown(&to));
        }
        if seen.is_dir() {
            fs::create_dir(&to).doing(|| shown(&to))?;
            made.directories += 1;
            directories.push((from.to_owned(), to, seen.clone()));
            return Ok(());
        }
        if seen.is_file() {
            made.bytes += whole_file(&disks, from, &to)?;
            made.files += 1;
            made.note_absence(&disks, from)?;
        } else {
            special_file(from, &to, seen).doing(|| shown(&to))?;
            made.others += 1;
        }
        if seen.nlink() > 1 {
            linked.insert(seen.ino(), to.clone());
        }
        progress.say(|| format!("{} files, {} bytes so far", made.files, made.bytes));
        like(from, &to, seen).doing(|| shown(&to))
    })?;
    for (from, to, seen) in directories.iter().rev() {
        like(from, to, seen).doing(|| shown(to))?;
    }
    report(&disks, &made, (to, args.json))
}

/// The disks or the projection, and where the files go.
fn destination(args: &ReassembleArgs) -> Result<(&[PathBuf], &Path), Failure> {
    match (&args.to, args.which.split_last()) {
        (Some(to), _) => Ok((&args.which, to)),
        (None, Some((to, which))) if !which.is_empty() && !own_disk::is_one(to) => Ok((which, to)),
        _ => Err(Failure::usage(
            "say where the files go: a directory that is not there yet, as the last argument",
        )),
    }
}

fn report(
    disks: &TargetDisks,
    made: &RestoredCounts,
    (to, as_json): (&Path, bool),
) -> Result<(), Failure> {
    let RestoredCounts { files, directories, others, bytes, incomplete, sparse } = made;
    if as_json {
        output::print_json(&json!({
            "projection": disks.definition.name, "files": files, "directories": directories,
            "others": others, "bytes": bytes, "incomplete": incomplete, "sparse": sparse,
        }))?;
    } else {
        incomplete.iter().chain(sparse).try_for_each(output::print_line)?;
        output::print_line(format!(
            "{files} files with {bytes} bytes, {directories} directories and {others} others are in {}",
            to.display()
        ))?;
    }
    match incomplete.len() {
        0 => Ok(()),
        count => {
            Err(Failure::new(format!("{count} files lack data, and have zeros in their place")))
        }
    }
}

/// One file out of its objects. Answers its size.
fn whole_file(disks: &TargetDisks, stub: &Path, to: &Path) -> Result<u64, Failure> {
    let file = OpenOptions::new().write(true).create_new(true).open(to).doing(|| shown(to))?;
    let Some(object) = object_of(stub)? else { return Ok(0) };
    let mut size = 0;
    for target in disks.targets_of(object) {
        size = size.max(copy_object(&disks.object_path(target, object), &file)?);
    }
    file.set_len(size).doing(|| shown(to))?;
    newest_times(disks, stub, object, &file).doing(|| shown(to))?;
    Ok(size)
}

/// Copies the data of an object, which are at the file's own offsets. Answers its size.
fn copy_object(path: &Path, to: &File) -> Result<u64, Failure> {
    let from = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0), // a hole
        opened => opened.doing(|| shown(path))?,
    };
    let size = from.metadata().doing(|| shown(path))?.len();
    let mut buffer = vec![0; COPY_BYTES];
    let mut at = 0;
    while let Some(data) = seek(&from, at, libc::SEEK_DATA).doing(|| shown(path))? {
        let hole = seek(&from, data, libc::SEEK_HOLE).doing(|| shown(path))?.unwrap_or(size);
        at = data;
        while at < hole {
            let wanted = usize::try_from(hole - at).unwrap_or(COPY_BYTES).min(COPY_BYTES);
            let count = from.read_at(&mut buffer[..wanted], at).doing(|| shown(path))?;
            if count == 0 {
                return Ok(size);
            }
            to.write_all_at(&buffer[..count], at).doing(|| shown(path))?;
            at += count as u64;
        }
    }
    Ok(size)
}

/// None: there is none behind `at`.
fn seek(file: &File, at: u64, whence: i32) -> io::Result<Option<u64>> {
    let at = i64::try_from(at).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}

/// The times are the latest of the stub and its objects.
fn newest_times(disks: &TargetDisks, stub: &Path, object: ObjectId, file: &File) -> io::Result<()> {
    let mut newest = fs::symlink_metadata(stub)?.modified()?;
    for target in disks.targets_of(object) {
        if let Ok(seen) = fs::symlink_metadata(disks.object_path(target, object)) {
            newest = newest.max(seen.modified()?);
        }
    }
    file.set_modified(newest)
}

fn special_file(from: &Path, to: &Path, seen: &Metadata) -> io::Result<()> {
    let kind = seen.file_type();
    if kind.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    debug_assert!(
        kind.is_fifo() || kind.is_socket() || kind.is_block_device() || kind.is_char_device()
    );
    let path = CString::new(to.as_os_str().as_bytes())?;
    // SAFETY: the path ends with NUL.
    let done = unsafe { libc::mknod(path.as_ptr(), seen.mode(), seen.rdev()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Gives `to` the owner, the attributes and the mode of `from`, and a directory its time.
fn like(from: &Path, to: &Path, seen: &Metadata) -> io::Result<()> {
    lchown(to, Some(seen.uid()), Some(seen.gid()))?;
    if seen.is_symlink() {
        return Ok(());
    }
    for name in xattrs::list(from)?.iter().filter(|name| !name.starts_with(b"trusted.dray.")) {
        if let Some(value) = xattrs::get(from, name)? {
            xattrs::set(to, name, &value)?;
        }
    }
    fs::set_permissions(to, Permissions::from_mode(seen.mode() & 0o7777))?;
    match seen.is_dir() {
        true => File::open(to)?.set_modified(seen.modified()?),
        false => Ok(()),
    }
}
