//! The disks of a projection whose servers have their own, without any server: all of them are mounted at
//! one machine.

mod absence;
mod check;
mod reassemble;
pub mod xattrs;

use std::collections::VecDeque;
use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dray_core::OBJECT_ATTRIBUTE;
use dray_layers::placement::{Definition, NAMES_DIR, OBJECTS_DIR, ObjectId, Placement};

use crate::error::{ErrorContext, Failure};
use crate::output;
use crate::serve::own_disk::{self, DiskLock};
use crate::serve::projections::{definitions_in, directory_of};

pub use check::run as check;
pub use reassemble::run as reassemble;

/// How often a long command says how far it is.
const PROGRESS: Duration = Duration::from_secs(5);

/// All disks of one projection.
struct TargetDisks {
    definition: Definition,
    placement: Placement,
    /// In the order of the definition; the first one is the home.
    dirs: Vec<PathBuf>,
    /// No server serves the disks meanwhile: what changes would be found to be wrong, and mended to death.
    _locks: Vec<DiskLock>,
}

impl TargetDisks {
    /// Errors: they are not the disks of one projection, or not all of them.
    fn open(given: &[PathBuf]) -> Result<TargetDisks, Failure> {
        let mut found: Option<(Definition, Vec<Option<PathBuf>>)> = None;
        for dir in given {
            let (server, placed) = own_disk::read(dir).map_err(Failure::new)?;
            let (definition, dirs) = found.get_or_insert_with(|| {
                let none = placed.servers.iter().map(|_| None).collect();
                (placed.clone(), none)
            });
            if *definition != placed {
                let (one, first) = (dir.display(), given[0].display());
                return Err(Failure::new(format!(
                    "{one} and {first} are of different projections"
                )));
            }
            let position = definition.position(&server).ok_or_else(|| {
                Failure::new(format!(
                    "{}: its server {server} is not in its definition",
                    dir.display()
                ))
            })?;
            if let Some(other) = dirs[position].replace(dir.clone()) {
                let (one, other) = (dir.display(), other.display());
                return Err(Failure::usage(format!(
                    "{one} and {other} are both disks of {server}"
                )));
            }
        }
        let (definition, dirs) = found.ok_or_else(|| Failure::usage("name the disks"))?;
        let missing: Vec<&str> = definition
            .servers
            .iter()
            .zip(&dirs)
            .filter_map(|(server, dir)| dir.is_none().then_some(server.as_str()))
            .collect();
        if !missing.is_empty() {
            return Err(Failure::usage(format!(
                "name the disks of {}, too",
                missing.join(" and ")
            )));
        }
        let dirs: Vec<PathBuf> = dirs.into_iter().flatten().collect();
        let locks = dirs.iter().zip(&definition.servers).map(|(dir, server)| lock(dir, server));
        let locks = locks.collect::<Result<_, Failure>>()?;
        must_be_one_tree(&dirs)?;
        Ok(TargetDisks { placement: Placement::new(&definition), definition, dirs, _locks: locks })
    }

    fn names(&self) -> PathBuf {
        self.dirs[0].join(NAMES_DIR)
    }

    /// The disks that have blocks of these objects, by their numbers.
    fn targets_of(&self, object: ObjectId) -> Vec<usize> {
        let block = |block| usize::from(self.placement.block(object.key(), block).0);
        (0..self.placement.width() as u64).map(block).collect()
    }

    fn object_path(&self, target: usize, object: ObjectId) -> PathBuf {
        let shard = format!("{:02x}", object.shard());
        self.dirs[target].join(OBJECTS_DIR).join(shard).join(object.to_string())
    }

    /// Everything below the directory of names, a directory before what is in it.
    fn walk_names(
        &self,
        mut inspect: impl FnMut(&Path, &Metadata) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut dirs = VecDeque::from([self.names()]);
        while let Some(dir) = dirs.pop_front() {
            for entry in listed(&dir)? {
                let seen = fs::symlink_metadata(&entry).doing(|| shown(&entry))?;
                inspect(&entry, &seen)?;
                if seen.is_dir() {
                    dirs.push_back(entry);
                }
            }
        }
        Ok(())
    }
}

/// The directories of a projection's servers: those that are named, or those of a projection in a file.
fn directories(which: &[PathBuf], file: Option<&Path>) -> Result<Vec<PathBuf>, Failure> {
    let Some(file) = file else {
        return match which.iter().find(|dir| !dir.is_dir()) {
            None => Ok(which.to_vec()),
            Some(other) => Err(Failure::usage(format!(
                "{} is no directory: name the directory of each server, or a projection and its file with \
                 --projections",
                other.display()
            ))),
        };
    };
    let [name] = which else {
        return Err(Failure::usage("--projections takes the name of one projection, and no disks"));
    };
    let definitions = definitions_in(file)?;
    let found = definitions.iter().find(|one| name.as_os_str() == one.name.as_str());
    let definition = found.ok_or_else(|| {
        let names: Vec<&str> = definitions.iter().map(|one| one.name.as_str()).collect();
        Failure::usage(format!(
            "{}: it has no projection `{}`, but {}",
            file.display(),
            name.display(),
            names.join(", ")
        ))
    })?;
    if definition.layout.is_shared() {
        return Err(Failure::usage(format!(
            "projection `{}` has the layout {}, whose servers have no disks of their own",
            definition.name, definition.layout
        )));
    }
    let dirs: Vec<PathBuf> =
        (0..definition.servers.len()).map(|position| directory_of(definition, position)).collect();
    match dirs.first() == dirs.last() && dirs.len() > 1 {
        false => Ok(dirs),
        true => Err(Failure::usage(format!(
            "projection `{}` has the same path at all servers, without `%n`: name the directory of each \
             server, where it is mounted here",
            definition.name
        ))),
    }
}

/// A disk that no client has used has no id.
fn must_be_one_tree(dirs: &[PathBuf]) -> Result<(), Failure> {
    let mut first: Option<(&PathBuf, String)> = None;
    for dir in dirs {
        let Some(id) = own_disk::tree_id(dir).map_err(Failure::new)? else { continue };
        let (other, known) = first.get_or_insert_with(|| (dir, id.clone()));
        if *known != id {
            let (one, other) = (dir.display(), other.display());
            return Err(Failure::new(format!(
                "{one} and {other} are of different trees: mount the right disks"
            )));
        }
    }
    Ok(())
}

fn lock(dir: &Path, server: &str) -> Result<DiskLock, Failure> {
    let lock = DiskLock::take(dir).map_err(Failure::new)?;
    lock.ok_or_else(|| {
        Failure::new(format!(
            "{} is in use: stop the server {server} first, or wait for the other `dray fsck` or \
             `dray reassemble`",
            dir.display()
        ))
    })
}

/// What is in a directory, in the order of the names.
fn listed(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(dir).and_then(|all| {
        all.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()
    });
    let mut entries = entries.doing(|| shown(dir))?;
    entries.sort();
    Ok(entries)
}

/// The id of the objects of a stub, if it has any.
fn object_of(stub: &Path) -> Result<Option<ObjectId>, Failure> {
    let value = xattrs::get(stub, OBJECT_ATTRIBUTE).doing(|| shown(stub))?;
    value
        .map(|value| ObjectId::from_attribute(&value))
        .transpose()
        .map_err(|error| Failure::new(format!("{}: {error}", stub.display())))
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// Says on stderr how far a command is.
struct Progress {
    said: Instant,
    quiet: bool,
}

impl Progress {
    fn new(quiet: bool) -> Progress {
        Progress { said: Instant::now(), quiet }
    }

    fn say(&mut self, what: impl FnOnce() -> String) {
        if !self.quiet && self.said.elapsed() >= PROGRESS {
            self.said = Instant::now();
            output::complain(what());
        }
    }
}
