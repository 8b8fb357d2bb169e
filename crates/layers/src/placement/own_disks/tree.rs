//! Whether the disks of all servers belong to one tree.
//!
//! The home has a random id of the tree, and each target has a copy of it. The id is the text of a symbolic
//! link, which is made in one step. Servers do not speak with each other, so that clients carry the id from the
//! home to a target that has none. The home notes which targets have it. So a target that had it once and has
//! none now is an empty disk in the place of the right one.

use dray_core::{Errno, Error, FileId, FileSystem, Make, Name, NameBuf, Result};

use super::{HOME, OBJECTS_DIR, name, of_no_request};
use crate::placement::ServerIndex;

/// In the directory of objects of each disk: a symbolic link whose text is the id of the tree, in 32
/// hexadecimal digits.
pub const TREE_LINK: &str = "tree";

/// The place of a note at the home that the target has the id.
fn note_of(target: ServerIndex) -> Result<NameBuf> {
    NameBuf::new(format!("{TREE_LINK}.{}", target.0 + 1).as_bytes())
}

/// Why a disk is not one of the tree.
#[derive(Debug, PartialEq, Eq)]
pub enum WrongTree {
    /// The disk has the id of another tree.
    Other,
    /// The disk has no id, and the disk there had the right one before.
    Empty,
}

/// Compares the disks of all servers, in the order of the definition, with that of the home, which is the
/// first. Disks that never had an id get it. A home without an id is that of a former version: nothing is compared. Answers
/// the first disk that is wrong. Errors: those of the servers.
pub async fn find_wrong_tree(
    servers: &[&dyn FileSystem],
) -> Result<Option<(ServerIndex, WrongTree)>> {
    let home = servers[usize::from(HOME.0)];
    let home_dir = objects_of(home).await?;
    let Some(tree) = read_link(home, home_dir, name(TREE_LINK)?).await? else { return Ok(None) };
    for (index, fs) in (0..).zip(servers).skip(1) {
        let target = ServerIndex(index);
        let note = note_of(target)?;
        let dir = objects_of(*fs).await?;
        let noted = read_link(home, home_dir, &note).await?.is_some();
        match read_link(*fs, dir, name(TREE_LINK)?).await? {
            Some(found) if found != tree => return Ok(Some((target, WrongTree::Other))),
            Some(_) => {}
            None if noted => return Ok(Some((target, WrongTree::Empty))),
            None => {
                if !make_link(*fs, dir, (name(TREE_LINK)?, &tree)).await? {
                    return Ok(Some((target, WrongTree::Other)));
                }
            }
        }
        if !noted {
            make_link(home, home_dir, (&note, &tree)).await?;
        }
    }
    Ok(None)
}

async fn objects_of(fs: &dyn FileSystem) -> Result<FileId> {
    Ok(fs.lookup(&of_no_request(), fs.info().root, name(OBJECTS_DIR)?).await?.id)
}

async fn read_link(fs: &dyn FileSystem, dir: FileId, link: &Name) -> Result<Option<Vec<u8>>> {
    match fs.lookup(&of_no_request(), dir, link).await {
        Ok(entry) => fs.readlink(&of_no_request(), entry.id).await.map(Some),
        Err(error) if error.errno() == Errno::ENOENT => Ok(None),
        Err(error) => Err(error),
    }
}

/// False: another client has made one with another text. An export that takes no changes gets none.
async fn make_link(fs: &dyn FileSystem, dir: FileId, (link, text): (&Name, &[u8])) -> Result<bool> {
    match fs.make(&of_no_request(), dir, link, Make::Symlink { target: text }).await {
        Ok(_) => Ok(true),
        Err(error) if error.errno() == Errno::EEXIST => {
            let found = read_link(fs, dir, link).await?;
            Ok(found.ok_or_else(|| Error::new(Errno::ESTALE))? == text)
        }
        Err(error) if error.errno() == Errno::EROFS => Ok(true),
        Err(error) => Err(error),
    }
}
