//! The mounts of dray, as the kernel lists them. Asking the mounts themselves could hang.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::paths;

const TABLE: &str = "/proc/self/mountinfo";
/// Our type of file system.
const TYPE: &[u8] = b"fuse.dray";
/// Of a line of the table: the flags of the mount.
const OPTIONS_FIELD: usize = 5;

/// One mount of dray.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Where.
    pub at: PathBuf,
    /// What: the target.
    pub source: String,
    /// The kernel's number of the connection, which is the minor number of the device.
    pub connection: u32,
    /// The user who mounted it.
    pub user: u32,
    /// The kernel checks permissions.
    pub checks: bool,
}

/// All mounts of dray that this process sees.
pub fn list() -> Vec<MountEntry> {
    let table = std::fs::read(TABLE).unwrap_or_default();
    table.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

/// The topmost mount of dray at `at`, if there is one.
pub fn find(at: &Path) -> Option<MountEntry> {
    list().into_iter().rev().find(|entry| entry.at == at)
}

/// The flags of the topmost mount of dray at `at` as `-o` has them.
pub fn flags_at(at: &Path) -> String {
    let table = std::fs::read(TABLE).unwrap_or_default();
    let mut lines: Vec<&[u8]> = table.split(|&byte| byte == b'\n').collect();
    lines.retain(|line| parse_line(line).is_some_and(|entry| entry.at == at));
    let line = String::from_utf8_lossy(lines.last().copied().unwrap_or_default());
    let options = line.split(' ').nth(OPTIONS_FIELD).unwrap_or_default().split(',');
    let known = options.filter(|option| ["ro", "nosuid", "nodev", "noexec"].contains(option));
    known.collect::<Vec<_>>().join(",")
}

/// Where else the file system of this connection is mounted, with `mount --bind` and the like;
/// the first of them first.
pub fn places_of(connection: u32) -> Vec<MountEntry> {
    let mut all = list();
    all.retain(|entry| entry.connection == connection);
    all
}

/// A mount, wherever it is by now: it, or a directory above it, may have been moved.
#[derive(Clone, Debug)]
pub struct MountInfo {
    /// Where it was made.
    pub at: PathBuf,
    /// The kernel's number of the connection; none: it is not known.
    pub connection: Option<u32>,
}

impl MountInfo {
    /// Where it is. To be asked of a mount that is in use: the kernel gives the number of a connection
    /// that has ended to the next one.
    pub fn place(&self) -> Option<MountEntry> {
        let Some(connection) = self.connection else { return find(&self.at) };
        let all = places_of(connection);
        all.iter().rfind(|entry| entry.at == self.at).or(all.first()).cloned()
    }

    /// The same for a command that asks it for something: where it was, if it is nowhere to be seen.
    pub fn now_at(&self) -> PathBuf {
        self.place().map_or_else(|| self.at.clone(), |place| place.at)
    }

    /// By which its processes are found.
    pub fn name(&self) -> String {
        paths::mount_name(&self.at, self.connection)
    }
}

/// Whether nothing else is mounted over this mount.
pub fn is_on_top(mount: &MountEntry) -> bool {
    find_around(&mount.at).as_ref() == Some(mount)
}

/// A path with its links followed as far as to a mount of dray, of which nothing is looked at: its
/// server may not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedPath {
    /// Absolute. Within a mount of dray as it was given.
    pub path: PathBuf,
    /// The mount of dray that it is in.
    pub mount: Option<MountEntry>,
}

impl ResolvedPath {
    /// The mount of dray at the very path.
    pub fn mounted_there(self) -> Option<MountEntry> {
        self.mount.filter(|entry| entry.at == self.path)
    }
}

/// Links that are followed, as in path_resolution(7).
const LINKS_MAX: usize = 40;

/// Follows the links of `path`. Errors: no working directory.
pub fn follow(path: &Path) -> io::Result<ResolvedPath> {
    let path = std::path::absolute(path)?;
    let parts = |path: &Path| -> Vec<OsString> {
        path.components().rev().map(|part| part.as_os_str().to_owned()).collect()
    };
    let (mut left, mut at, mut links) = (parts(&path), PathBuf::new(), 0);
    while let Some(part) = left.pop() {
        match part.as_bytes() {
            b".." => _ = at.pop(),
            b"." => {}
            _ => at.push(part), // the root takes the place of everything
        }
        if find_around(&at).is_some() {
            at.extend(left.iter().rev());
            return Ok(ResolvedPath { mount: find_around(&at), path: at }); // one within it, perhaps
        }
        // What is no link, or cannot be looked at, stands for itself.
        if links < LINKS_MAX
            && let Ok(target) = std::fs::read_link(&at)
        {
            links += 1;
            at.pop();
            left.extend(parts(&target));
        }
    }
    Ok(ResolvedPath { path: at, mount: None })
}

/// The topmost mount of dray at `path`, absolute, or at what it is in, going by names alone.
/// None if something else is mounted in between.
fn find_around(path: &Path) -> Option<MountEntry> {
    let table = std::fs::read(TABLE).unwrap_or_default();
    parse_line(line_around(&table, path)?)
}

/// A directory as its file system knows it, wherever that is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnderlyingDirectory {
    /// `MAJOR:MINOR` of its device.
    device: Vec<u8>,
    /// From the root of that file system on.
    path: PathBuf,
}

impl UnderlyingDirectory {
    /// Whether one of both is in the other, or they are the same.
    pub fn meets(&self, other: &UnderlyingDirectory) -> bool {
        let within = self.path.starts_with(&other.path) || other.path.starts_with(&self.path);
        self.device == other.device && within
    }
}

/// What `paths`, absolute and without links, are below, going by names alone; none of what is
/// mounted nowhere.
pub fn below(paths: &[&Path]) -> Vec<Option<UnderlyingDirectory>> {
    let table = std::fs::read(TABLE).unwrap_or_default();
    paths.iter().map(|path| below_by(&table, path)).collect()
}

fn below_by(table: &[u8], path: &Path) -> Option<UnderlyingDirectory> {
    let line = line_around(table, path)?;
    let field = |number| line.split(|&byte| byte == b' ').nth(number);
    let root = PathBuf::from(OsString::from_vec(unescape(field(3)?)));
    let rest = path.strip_prefix(mount_point(line)?).ok()?;
    Some(UnderlyingDirectory { device: field(2)?.to_vec(), path: root.join(rest) })
}

/// Whether something is mounted at `path` at the first access (autofs).
pub fn is_automount(path: &Path) -> bool {
    let table = std::fs::read(TABLE).unwrap_or_default();
    line_around(&table, path).and_then(kind) == Some(&b"autofs"[..])
}

/// What the table says of the file system that `path` is in.
fn line_around<'a>(table: &'a [u8], path: &Path) -> Option<&'a [u8]> {
    let around = |line: &&[u8]| mount_point(line).is_some_and(|at| path.starts_with(at));
    let lines = table.split(|&byte| byte == b'\n').filter(around);
    // Of those at one place the last is on top.
    lines.max_by_key(|line| mount_point(line).map(|at| at.components().count()))
}

/// The type of a file system.
fn kind(line: &[u8]) -> Option<&[u8]> {
    line.split(|&byte| byte == b' ').skip_while(|field| *field != b"-").nth(1)
}

/// Where a line of the table says that something is mounted.
pub fn place_of(line: &[u8]) -> Option<PathBuf> {
    mount_point(line)
}

fn mount_point(line: &[u8]) -> Option<PathBuf> {
    let field = line.split(|&byte| byte == b' ').nth(4)?;
    Some(PathBuf::from(OsString::from_vec(unescape(field))))
}

/// `ID PARENT MAJOR:MINOR ROOT MOUNTPOINT OPTIONS [FIELD...] - TYPE SOURCE OPTIONS`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    let dash = fields.iter().position(|field| *field == b"-")?;
    if *fields.get(dash + 1)? != TYPE {
        return None;
    }
    let at = PathBuf::from(OsString::from_vec(unescape(fields.get(4)?)));
    let source = String::from_utf8_lossy(&unescape(fields.get(dash + 2)?)).into_owned();
    let device = std::str::from_utf8(fields.get(2)?).ok()?;
    let connection = device.split_once(':')?.1.parse().ok()?;
    let options = fields.get(dash + 3).copied().unwrap_or_default();
    let options = || options.split(|&byte| byte == b',');
    let checks = options().any(|option| option == b"default_permissions");
    let user = options().find_map(|option| option.strip_prefix(b"user_id="))?;
    let user = std::str::from_utf8(user).ok()?.parse().ok()?;
    Some(MountEntry { at, source, connection, user, checks })
}

/// Blanks and backslashes are written as three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.get(..3).filter(|_| first == b'\\');
        let code =
            digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match code {
            Some(code) => {
                plain.push(code);
                rest = &behind[3..];
            }
            None => {
                plain.push(first);
                rest = behind;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_as_the_kernel_does() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(base.join("a/b")).unwrap();
        for (target, link) in [("a", "near"), ("near/b/../b", "far"), ("loop", "loop")] {
            std::os::unix::fs::symlink(target, base.join(link)).unwrap();
        }
        std::os::unix::fs::symlink(base.join("far"), base.join("a/b/up")).unwrap();
        for (path, expected) in
            [("near/b", "a/b"), ("far/up/none", "a/b/none"), ("far/..", "a"), ("none", "none")]
        {
            let followed = follow(&base.join(path)).unwrap();
            assert_eq!((followed.path, followed.mount), (base.join(expected), None), "{path}");
        }
        assert_eq!(follow(&base.join("loop")).unwrap().path, base.join("loop"));
        assert_eq!(follow(Path::new("/..")).unwrap().path, Path::new("/"));
    }

    #[test]
    fn the_nearest_file_system_is_the_one_that_a_path_is_in() {
        let table = b"1 0 8:1 / / rw - ext4 /dev/sda rw\n\
            2 1 0:5 / /home rw - autofs systemd-1 rw\n\
            3 1 0:6 / /data rw - autofs systemd-1 rw\n\
            4 3 0:7 / /data rw shared:1 - fuse.dray dray://h/x rw,user_id=0\n";
        let kind_around = |path: &str| line_around(table, Path::new(path)).and_then(kind);
        assert_eq!(kind_around("/home"), Some(&b"autofs"[..]));
        assert_eq!(kind_around("/data"), Some(&b"fuse.dray"[..]));
        assert_eq!(kind_around("/homes"), Some(&b"ext4"[..]));
    }

    #[test]
    fn a_directory_is_the_same_wherever_it_is_mounted() {
        let table = b"1 0 8:1 / / rw - ext4 /dev/sda rw\n\
            2 1 8:1 /srv/a\\040b /bound rw - ext4 /dev/sda rw\n\
            3 1 8:2 / /disk rw - xfs /dev/sdb rw\n\
            4 1 8:2 /srv /srv/x rw - xfs /dev/sdb rw\n";
        let meet = |one: &str, two: &str| {
            let [one, two] = [one, two].map(|path| below_by(table, Path::new(path)).unwrap());
            assert_eq!(one.meets(&two), two.meets(&one));
            one.meets(&two)
        };
        assert!(meet("/bound", "/srv/a b") && meet("/bound/c", "/srv/a b") && meet("/bound", "/"));
        assert!(meet("/srv/x/y", "/disk/srv/y") && meet("/srv/x", "/disk"));
        assert!(!meet("/bound", "/srv/a") && !meet("/bound/c", "/srv/a b/d"));
        assert!(!meet("/srv/x", "/srv"), "another file system is mounted there");
        assert_eq!(below_by(b"", Path::new("/")), None);
    }

    #[test]
    fn lines_of_the_kernel_are_understood() {
        let line =
            b"36 35 0:44 / /mnt/a\\040b rw,relatime shared:1 - fuse.dray dray://h:1/x rw,user_id=0";
        let entry = parse_line(line).unwrap();
        assert_eq!(entry.at.to_str(), Some("/mnt/a b"));
        assert_eq!((&*entry.source, entry.connection), ("dray://h:1/x", 44));
        assert!(!entry.checks);
        let line =
            b"36 35 0:44 / /mnt rw - fuse.dray d rw,user_id=0,default_permissions,allow_other";
        assert!(parse_line(line).unwrap().checks);
        assert!(parse_line(b"36 35 0:44 / /mnt rw - fuse.sshfs h: rw").is_none());
        assert!(parse_line(b"36 35 0:44 / /mnt rw").is_none());
        assert!(parse_line(b"").is_none());
        assert_eq!(unescape(b"a\\134\\9"), b"a\\\\9");
    }
}
