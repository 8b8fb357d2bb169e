//! Ids of the data of files whose data are at other servers. The server of the names gives them,
//! and keeps each in an attribute of the file's stub.

use dray_core::{
    Context, Errno, Error, FileId, FileType, NEW_OBJECT_ATTRIBUTE, OBJECT_ATTRIBUTE, Result,
    XattrSet,
};

use crate::server::as_server;
use crate::server::session::ServerSession;

/// Whether the attribute is one by which a client of this export asks for the id of a file's data.
pub(super) fn are_asked(session: &ServerSession, name: &[u8]) -> bool {
    session.export.gives_object_ids && (name == OBJECT_ATTRIBUTE || name == NEW_OBJECT_ATTRIBUTE)
}

/// The id of a file's data; asking twice does no harm. The id is no secret from clients: only
/// clients that speak for all their users can open the data that it names. Errors: `ENODATA` if the
/// file has none and is to get none.
pub(super) async fn of(
    session: &ServerSession,
    cx: &Context,
    id: FileId,
    name: &[u8],
) -> Result<Vec<u8>> {
    let (fs, cx) = (&*session.export.fs, &as_server::to_look(cx));
    match fs.getxattr(cx, id, OBJECT_ATTRIBUTE).await {
        Err(error) if error.errno() == Errno::ENODATA && name == NEW_OBJECT_ATTRIBUTE => {}
        outcome => return outcome,
    }
    if fs.getattr(cx, id).await?.file_type() != FileType::Regular {
        return Err(Error::new(Errno::EINVAL).because("only regular files have data elsewhere"));
    }
    let mut new = [0; 16];
    dray_rt::random_bytes(&mut new);
    match fs.setxattr(cx, id, OBJECT_ATTRIBUTE, &new, XattrSet::Create).await {
        Ok(()) => Ok(new.to_vec()),
        // Another client has set the id first.
        Err(error) if error.errno() == Errno::EEXIST => fs.getxattr(cx, id, OBJECT_ATTRIBUTE).await,
        Err(error) => Err(error),
    }
}
