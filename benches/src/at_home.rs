//! Files that stay on one of several servers of a projection: the server of their names is their home, too.
//!
//! The number that a file system gives a new file decides on its home. tmpfs counts its inodes up by one, so the number
//! of the next file is known. Numbers with another home are given to files that are removed at once.

use std::fs;
use std::io;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};

use dray_core::FileId;
use dray_layers::placement::{Placement, ServerIndex, parse_definitions};

use crate::{CommandResult, context};

/// Directories that are made for one that is at home where the directory above is: all but one in 2^256 get home.
const DIRS_MAX: usize = 256;
/// Numbers that are passed over for one file. More say that the file system does not count up.
const NUMBERS_MAX: usize = 256;

/// A directory whose files are at home at the server of its names. The directory is as the servers have it.
pub struct AtHome {
    placement: Placement,
    server: ServerIndex,
    dir: PathBuf,
}

fn id_of(ino: u64) -> FileId {
    FileId { ino, generation: 0 }
}

fn number_of(path: &Path) -> CommandResult<u64> {
    fs::symlink_metadata(path).map(|found| found.ino()).map_err(context("look at a directory"))
}

impl AtHome {
    /// Of the first projection that the file `projections` defines. Errors: no definition, no directory.
    pub fn new(projections: &Path, dir: &Path) -> CommandResult<AtHome> {
        let placement = placement_of(projections)?;
        let server = placement.directory(id_of(number_of(dir)?));
        Ok(AtHome { placement, server, dir: dir.to_owned() })
    }

    /// Makes `dir`, which has its names and its attributes at the server of the names beside it. Answers that server.
    pub fn make(projections: &Path, dir: &Path) -> CommandResult<ServerIndex> {
        let placement = placement_of(projections)?;
        let above = dir.parent().ok_or("--dir has no directory above")?;
        let server = placement.directory(id_of(number_of(above)?));
        let mut others = Vec::new();
        let mut made = None;
        while made.is_none() && others.len() < DIRS_MAX {
            let tried = dir.with_extension(others.len().to_string());
            fs::create_dir(&tried).map_err(context("make a directory"))?;
            let id = id_of(number_of(&tried)?);
            if (placement.directory(id), placement.home(id)) == (server, server) {
                made = Some(fs::rename(&tried, dir).map_err(context("name the directory"))?);
            } else {
                others.push(tried); // its number is taken meanwhile
            }
        }
        for other in others {
            fs::remove_dir(other).map_err(context("remove a directory"))?;
        }
        made.map(|()| server).ok_or_else(|| "no directory has names and home together".to_owned())
    }

    fn is_home(&self, number: u64) -> bool {
        self.placement.home(id_of(number)) == self.server
    }

    /// For the making of files in the directory by one thread. No other one makes files there.
    pub fn numbers(&self) -> HomeNumbers<'_> {
        HomeNumbers { at_home: self, next: None }
    }

    /// Errors: a file in the directory is not at home.
    pub fn check(&self) -> CommandResult {
        for entry in fs::read_dir(&self.dir).map_err(context("check homes"))? {
            let entry = entry.map_err(context("check homes"))?;
            if !self.is_home(entry.ino()) {
                return Err(format!("{} has another home", entry.path().display()));
            }
        }
        Ok(())
    }
}

fn placement_of(projections: &Path) -> CommandResult<Placement> {
    let text = fs::read_to_string(projections).map_err(context("--projections"))?;
    let definitions =
        parse_definitions(&text).map_err(|_| "--projections: a definition is wrong".to_owned())?;
    definitions.first().map(Placement::new).ok_or_else(|| "--projections: none".to_owned())
}

/// The numbers of the next files.
pub struct HomeNumbers<'a> {
    at_home: &'a AtHome,
    /// None: not known yet.
    next: Option<u64>,
}

impl HomeNumbers<'_> {
    /// To be called before each file that is made: it will be at home.
    pub fn pass_over(&mut self) -> io::Result<()> {
        let spare = self.at_home.dir.with_extension("spare");
        self.pass_over_by(|| {
            let made = fs::File::create_new(&spare)?;
            fs::remove_file(&spare)?;
            Ok(made.metadata()?.ino())
        })
    }

    /// `take` takes a number and answers it.
    fn pass_over_by(&mut self, mut take: impl FnMut() -> io::Result<u64>) -> io::Result<()> {
        for _ in 0..NUMBERS_MAX {
            if let Some(next) = self.next.filter(|next| self.at_home.is_home(*next)) {
                self.next = Some(next + 1); // behind the file that is made now
                return Ok(());
            }
            self.next = Some(take()? + 1);
        }
        Err(io::Error::other("numbers of files do not count up"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_servers(dir: &Path) -> PathBuf {
        let file = dir.join("projections.toml");
        let text = "[projection.x]\nlayout = 'cluster'\nservers = ['tcp://io1', 'tcp://io2']\npath = '/'\n";
        fs::write(&file, text).unwrap();
        file
    }

    #[test]
    fn numbers_of_other_homes_are_passed_over() {
        let scratch = tempfile::tempdir().unwrap();
        let at_home = AtHome::new(&two_servers(scratch.path()), scratch.path()).unwrap();
        let (mut numbers, mut last, mut taken) = (at_home.numbers(), 1000, 0);
        for _ in 0..100 {
            let passed_over = numbers.pass_over_by(|| {
                (last, taken) = (last + 1, taken + 1);
                Ok(last)
            });
            passed_over.unwrap();
            last += 1; // the file
            assert!(at_home.is_home(last), "{last}");
        }
        assert!((50..200).contains(&taken), "{taken}");
        let mut stuck = at_home.numbers();
        let away = (0..).find(|number| !at_home.is_home(number + 1)).unwrap();
        assert!(stuck.pass_over_by(|| Ok(away)).is_err());
    }

    #[test]
    fn a_directory_is_made_where_the_one_above_has_its_names() {
        let scratch = tempfile::tempdir().unwrap();
        let projections = two_servers(scratch.path());
        let root = scratch.path().join("root");
        fs::create_dir(&root).unwrap();
        for name in ["a", "b", "c", "d"] {
            let dir = root.join(name);
            let server = AtHome::make(&projections, &dir).unwrap();
            let at_home = AtHome::new(&projections, &root).unwrap();
            assert_eq!(at_home.server, server);
            assert!(at_home.is_home(number_of(&dir).unwrap()));
            assert!(at_home.check().is_ok());
        }
        let at_home = AtHome::new(&projections, &root).unwrap();
        let away = (0..).map(|number| root.join(format!("away{number}"))).find(|path| {
            fs::write(path, "").unwrap();
            !at_home.is_home(number_of(path).unwrap())
        });
        assert!(at_home.check().unwrap_err().contains(away.unwrap().to_str().unwrap()));
    }
}
