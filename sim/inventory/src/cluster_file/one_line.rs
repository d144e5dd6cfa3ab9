//! `2 x (8 x h100-sxm, nvswitch, 8 x ndr); 4 x l40s, 2 x ndr`: nodes apart by `;`, their parts by `,`.
//! A part is a fabric, a device or a NIC; the catalogue tells which.

use infercluster_spec::cluster::LinkKind;

use super::form::{ClusterForm, Counted, FabricForm, FabricKind, NetworkForm, NodeForm};
use crate::catalogue::Catalogue;
use crate::error::InventoryError;
use crate::toml_file::OneOrMany;

/// The name that errors carry.
pub(super) const FILE: &str = "cluster line";

pub(super) fn parse(line: &str, catalogue: &Catalogue) -> Result<ClusterForm, InventoryError> {
    let nodes = line
        .split(';')
        .enumerate()
        .map(|(index, text)| node(index, text.trim(), catalogue));
    Ok(ClusterForm {
        name: None,
        node: nodes.collect::<Result<_, _>>()?,
        network: NetworkForm::default(),
        device: Vec::new(),
        link: Vec::new(),
    })
}

fn bad(field: String, found: &str, expected: &str) -> InventoryError {
    let shown: String = found.chars().take(80).collect();
    InventoryError::BadField {
        file: FILE.to_owned(),
        field,
        found: format!("`{shown}`"),
        expected: expected.to_owned(),
    }
}

fn node(index: usize, text: &str, catalogue: &Catalogue) -> Result<NodeForm, InventoryError> {
    let field = format!("node[{index}]");
    let (count, parts) = match text.strip_suffix(')').and_then(|text| text.split_once('(')) {
        Some((count, parts)) => {
            let counted = format!("{count}node").parse::<Counted>();
            let expected = "a count before the parenthesis such as `2 x (...)`";
            let count = counted
                .ok()
                .filter(|counted| counted.name == "node")
                .and_then(|counted| u32::try_from(counted.count).ok())
                .ok_or_else(|| bad(field.clone(), text, expected))?;
            (count, parts)
        }
        None => (1, text),
    };
    let mut form = NodeForm {
        name: None,
        count,
        names: Vec::new(),
        gpus: OneOrMany::default(),
        fabric: None,
        nics: OneOrMany::default(),
        nic_names: Vec::new(),
        links: Vec::new(),
        pcie: None,
        switches: Vec::new(),
        sockets: Vec::new(),
        socket: None,
        memory: None,
        speed: None,
    };
    for part in parts.split(',').map(str::trim) {
        let fabric = match part.to_lowercase().as_str() {
            "nvswitch" => Some(FabricKind::Nvswitch),
            "none" => Some(FabricKind::None),
            _ => None,
        };
        if let Some(kind) = fabric {
            form.fabric = Some(FabricForm::plain(kind));
            continue;
        }
        let counted: Counted = part.parse().map_err(|_| {
            bad(
                field.clone(),
                part,
                "devices, NICs or a fabric such as `8 x h100-sxm, nvswitch, 8 x ndr`",
            )
        })?;
        match catalogue.link(&counted.name) {
            Ok(link) if link.kind == LinkKind::Pcie => form.pcie = Some(counted.name),
            Ok(link) if matches!(link.kind, LinkKind::Nvlink | LinkKind::Xgmi) => {
                form.fabric = Some(FabricForm {
                    link: Some(counted.name),
                    ..FabricForm::plain(FabricKind::Mesh)
                });
            }
            Ok(_) => form.nics.values.push(counted),
            // An unknown name is looked up, and complained about, as a device.
            Err(_) => form.gpus.values.push(counted),
        }
    }
    Ok(form)
}
