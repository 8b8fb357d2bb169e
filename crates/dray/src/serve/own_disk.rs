//! The disk of a server whose projection is over servers with their own disks. It is made ready once, and
//! says what it is a part of. Data that were placed by another mapping would be read as holes, so that a
//! disk that says something else is not served.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown, lchown, symlink};
use std::path::Path;
use std::time::Duration;

use dray_backends::backend::Squash;
use dray_layers::placement::{
    Definition, NAMES_DIR, OBJECTS_DIR, SHARDS, TREE_LINK, parse_definitions,
};
use serde::{Deserialize, Serialize};

use crate::flock::lock_within;
use crate::serve::projections::ServedProjection;

/// In the directory of the export: what the disk is a part of.
const FILE_NAME: &str = "target.toml";
/// Beside it: locked by who serves the disk, or checks it. Only its owner can lock it.
const LOCK_NAME: &str = "target.lock";
/// A process that is killed gives its lock up as it ends, which may take this long.
const LOCK_PATIENCE: Duration = Duration::from_millis(500);
const VERSION: u32 = 1;
/// What file systems have in an empty directory.
const LOST_AND_FOUND: &str = "lost+found";

/// What stands in the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    version: u32,
    /// As in the definition.
    server: String,
    /// By which the data were placed.
    definition: String,
}

/// Nobody else serves or checks the disk as long as this is there. The kernel takes the lock away with the
/// process, however that ends.
pub struct DiskLock(#[expect(dead_code, reason = "it is held, and not used")] Option<File>);

impl DiskLock {
    /// Errors: a sentence without its end; `None` where another process has the disk.
    pub fn take(dir: &Path) -> Result<Option<DiskLock>, String> {
        let path = dir.join(LOCK_NAME);
        let broken = |error: io::Error| format!("cannot lock {}: {error}", path.display());
        let open = |may_make: bool| {
            let mut how = OpenOptions::new();
            how.read(true).write(may_make).create(may_make);
            how.mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&path)
        };
        let opened = match open(true) {
            Err(error) if error.kind() == ErrorKind::ReadOnlyFilesystem => match open(false) {
                // Nobody can have locked it here, and nobody can change the disk.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    return Ok(Some(DiskLock(None)));
                }
                opened => opened,
            },
            opened => opened,
        };
        let file = opened.map_err(broken)?;
        let locked = lock_within(&file, LOCK_PATIENCE).map_err(broken)?;
        Ok(locked.then_some(DiskLock(Some(file))))
    }
}

/// Makes the directory of an export ready, or checks that it is the right one, and keeps others from it.
/// `squash` says who the super-user of clients is there, to whom objects belong. Errors: a sentence
/// without its end.
pub fn prepare(
    dir: &Path,
    projection: &ServedProjection,
    squash: Squash,
) -> Result<DiskLock, String> {
    is_made(dir, projection)?; // nothing is left in a directory that is refused
    let lock = DiskLock::take(dir)?.ok_or_else(|| {
        format!(
            "another server serves {}, or `dray fsck` or `dray reassemble` reads it: stop that one first",
            dir.display()
        )
    })?;
    let broken = |error: io::Error| format!("cannot make {} ready: {error}", dir.display());
    if !is_made(dir, projection)? {
        make(dir, projection, squash).map_err(broken)?;
    }
    if projection.is_home() {
        give_id(dir, squash).map_err(broken)?;
    }
    check_directories(dir, projection, squash)?;
    Ok(lock)
}

/// Whether the disk says that it is this one. False: it is empty. Errors: it may not be used.
fn is_made(dir: &Path, projection: &ServedProjection) -> Result<bool, String> {
    let path = dir.join(FILE_NAME);
    match fs::read_to_string(&path) {
        Ok(text) => {
            let checked = check_content(&text, projection).map(|()| true);
            checked.map_err(|what| format!("{}: {what}", path.display()))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => must_be_empty(dir).map(|()| false),
        Err(error) => Err(format!("cannot make {} ready: {error}", dir.display())),
    }
}

/// Whether `dir` is a disk of any projection.
pub fn is_one(dir: &Path) -> bool {
    dir.join(FILE_NAME).is_file()
}

/// The owner of the disk at `dir`, and how the data on it were placed. Errors: a sentence without
/// its end.
pub fn read(dir: &Path) -> Result<(String, Definition), String> {
    let path = dir.join(FILE_NAME);
    let of = |what: String| format!("{}: {what}", path.display());
    let text = fs::read_to_string(&path).map_err(|error| of(error.to_string()))?;
    let Content { server, .. } = content_of(&text).map_err(of)?;
    Ok((server, placed_by(&text).map_err(of)?))
}

fn content_of(text: &str) -> Result<Content, String> {
    let content: Content = toml::from_str(text).map_err(|error| error.message().to_owned())?;
    match content.version {
        VERSION => Ok(content),
        other => Err(format!("version {other} is unknown")),
    }
}

fn placed_by(text: &str) -> Result<Definition, String> {
    let placed = parse_definitions(&content_of(text)?.definition).ok();
    placed.and_then(|mut all| all.pop()).ok_or_else(|| "its definition cannot be read".to_owned())
}

/// Whether the data at this server were placed as the definition says.
fn check_content(text: &str, projection: &ServedProjection) -> Result<(), String> {
    let (content, placed) = (content_of(text)?, placed_by(text)?);
    let now = &projection.definition;
    if placed.name != now.name {
        return Err(format!(
            "this disk is of the projection `{}`: mount the right one",
            placed.name
        ));
    }
    let server = &now.servers[projection.position];
    if content.server != *server {
        return Err(format!(
            "this disk is that of the server {}, and this server is {server}: swap them back",
            content.server
        ));
    }
    let differing = differing_keys(&placed, now);
    match differing.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "the files here were placed with another {}: write the former definition, which is in this \
             file; dray does not move data yet",
            differing.join(" and ")
        )),
    }
}

/// Keys of the definition that say where data are, and are not what they were.
fn differing_keys(placed: &Definition, now: &Definition) -> Vec<&'static str> {
    [
        ("layout", placed.layout == now.layout),
        ("list of servers", placed.servers == now.servers),
        ("width", placed.width == now.width),
        ("stripe", placed.stripe_bytes == now.stripe_bytes),
        ("data_hash", placed.data_hash == now.data_hash),
        ("atomic", placed.atomic == now.atomic),
    ]
    .into_iter()
    .filter_map(|(key, same)| (!same).then_some(key))
    .collect()
}

/// A start that ended halfway has left directories alone.
fn must_be_empty(dir: &Path) -> Result<(), String> {
    let listing = fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    for entry in listing {
        let name = entry.map_err(|error| format!("{}: {error}", dir.display()))?.file_name();
        if ![NAMES_DIR, OBJECTS_DIR, LOCK_NAME, LOST_AND_FOUND].iter().any(|known| name == *known) {
            return Err(format!(
                "{} is to become a disk of a projection, and has `{}` in it: name an empty directory",
                dir.display(),
                name.display()
            ));
        }
    }
    Ok(())
}

fn make(dir: &Path, projection: &ServedProjection, squash: Squash) -> io::Result<()> {
    let above = fs::metadata(dir)?;
    let (uid, gid) = owner_of_objects(squash);
    let make = |path: &Path, mode: u32, owner: (u32, u32)| {
        match fs::create_dir(path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        chown(path, Some(owner.0), Some(owner.1))?;
        fs::set_permissions(path, Permissions::from_mode(mode))
    };
    if projection.is_home() {
        make(&dir.join(NAMES_DIR), above.mode() & 0o7777, (above.uid(), above.gid()))?;
    }
    let objects = dir.join(OBJECTS_DIR);
    make(&objects, 0o700, (uid, gid))?;
    for shard in 0..SHARDS {
        make(&objects.join(format!("{shard:02x}")), 0o700, (uid, gid))?;
    }
    let content = Content {
        version: VERSION,
        server: projection.definition.servers[projection.position].clone(),
        definition: projection.definition.canonical(),
    };
    let text = toml::to_string(&content).map_err(io::Error::other)?;
    let new = dir.join(format!("{FILE_NAME}.new"));
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, dir.join(FILE_NAME))?;
    File::open(dir)?.sync_all()
}

/// Gives the tree its id, which clients carry to the targets.
fn give_id(dir: &Path, squash: Squash) -> io::Result<()> {
    let objects = dir.join(OBJECTS_DIR);
    let link = objects.join(TREE_LINK);
    let mut id = [0; 16];
    dray_rt::random_bytes(&mut id);
    match symlink(format!("{:032x}", u128::from_le_bytes(id)), &link) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
        made => made?,
    }
    let (uid, gid) = owner_of_objects(squash);
    lchown(&link, Some(uid), Some(gid))?;
    File::open(objects)?.sync_all()
}

/// The id of the tree that the disk at `dir` belongs to. None: no client has used it yet, or it is of a former
/// version. Errors: a sentence without its end.
pub fn tree_id(dir: &Path) -> Result<Option<String>, String> {
    let link = dir.join(OBJECTS_DIR).join(TREE_LINK);
    match fs::read_link(&link) {
        Ok(text) => Ok(Some(text.display().to_string())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{}: {error}", link.display())),
    }
}

fn check_directories(
    dir: &Path,
    projection: &ServedProjection,
    squash: Squash,
) -> Result<(), String> {
    let look = |name: &str| {
        let path = dir.join(name);
        fs::symlink_metadata(&path).map_err(|error| format!("{}: {error}", path.display()))
    };
    if projection.is_home() {
        look(NAMES_DIR)?;
    }
    let (objects, (uid, gid)) = (look(OBJECTS_DIR)?, owner_of_objects(squash));
    if (objects.uid(), objects.gid()) != (uid, gid) {
        return Err(format!(
            "the objects in {} belong to {}:{}, and the super-user of clients is {uid}:{gid} here: use \
             the former `squash`, or change the owner of all that is in it",
            dir.join(OBJECTS_DIR).display(),
            objects.uid(),
            objects.gid()
        ));
    }
    let above = fs::metadata(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    if uid != 0 && above.mode() & 0o001 == 0 && above.uid() != uid {
        return Err(format!(
            "user {uid}, to whom the objects belong, cannot enter {}: chmod o+x it",
            dir.display()
        ));
    }
    Ok(())
}

/// Who the super-user of clients is, who opens the objects.
fn owner_of_objects(squash: Squash) -> (u32, u32) {
    match squash {
        Squash::None => (0, 0),
        Squash::Root(uid, gid) | Squash::All(uid, gid) => (uid.0, gid.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn projection(text: &str, position: usize) -> ServedProjection {
        let text = format!("[projection.x]\npath = '/srv'\n{text}");
        ServedProjection { definition: parse_definitions(&text).unwrap().remove(0), position }
    }

    const TWO: &str = "layout = 'stripe'\nservers = ['tcp://io1', 'tcp://io2']\nstripe = '64K'";

    fn owner() -> Squash {
        // SAFETY: these calls cannot fail.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        Squash::Root(dray_core::Uid(uid), dray_core::Gid(gid))
    }

    // proves: P172
    #[test]
    fn a_disk_serves_what_it_was_made_for_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        fs::create_dir(at.join(OBJECTS_DIR)).unwrap(); // a start before ended here
        let serving = prepare(at, &projection(TWO, 1), owner()).unwrap();
        let Err(said) = prepare(at, &projection(TWO, 1), owner()) else { panic!("served twice") };
        assert!(said.contains("another server serves"), "{said}");
        drop(serving);
        prepare(at, &projection(&TWO.replace("64K", "65536"), 1), owner()).unwrap();
        assert_eq!(fs::read_dir(at.join(OBJECTS_DIR)).unwrap().count(), SHARDS);
        assert_eq!(tree_id(at), Ok(None), "the home has it first");
        assert!(!at.join(NAMES_DIR).exists(), "it is not the home");
        for (text, position, words) in [
            (TWO.to_owned(), 0, "this disk is that of the server tcp://io2:7440"),
            (TWO.replace("64K", "1M"), 1, "another stripe:"),
            (TWO.replace("stripe'", "file'"), 1, "another layout and width"),
            (TWO.replace("'tcp://io2'", "'tcp://io2', 'tcp://io3'"), 1, "another list of servers"),
        ] {
            let said = prepare(at, &projection(&text, position), owner()).err().unwrap();
            assert!(said.contains(words), "{said}");
        }
        let other = Squash::Root(dray_core::Uid(77), dray_core::Gid(77));
        let said = prepare(at, &projection(TWO, 1), other).err().unwrap();
        assert!(said.contains("the super-user of clients is 77:77 here"), "{said}");
        fs::remove_file(at.join(FILE_NAME)).unwrap();
        fs::write(at.join("data"), "x").unwrap();
        let said = prepare(at, &projection(TWO, 1), owner()).err().unwrap();
        assert!(said.contains("has `data` in it: name an empty directory"), "{said}");
    }

    #[test]
    fn the_home_has_the_names() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o751)).unwrap();
        prepare(dir.path(), &projection(TWO, 0), owner()).unwrap();
        let names = fs::metadata(dir.path().join(NAMES_DIR)).unwrap();
        assert_eq!(names.mode() & 0o7777, 0o751);
        let id = tree_id(dir.path()).unwrap().unwrap();
        assert_eq!(id.len(), 32);
        prepare(dir.path(), &projection(TWO, 0), owner()).unwrap();
        assert_eq!(tree_id(dir.path()), Ok(Some(id)));
    }
}
