//! `nvidia-smi -q -x`: one `<gpu>` for each device, and the number of devices in front.

use super::error::ImportError;
use super::facts::{GpuFacts, bus, memory, packed_pci_id};
use super::xml::Xml;
use super::{Import, Kind};

/// Devices of one host.
const GPUS_LIMIT: usize = 256;

pub(super) fn read(xml: &Xml) -> Result<Import, ImportError> {
    let mut import = Import::new(Kind::SmiXml);
    let children: Vec<usize> = xml
        .below(0)
        .filter(|(_, element)| element.parent == Some(0) && element.name == "gpu")
        .map(|(position, _)| position)
        .collect();
    let attached = xml.below(0).find(|(_, element)| element.name == "attached_gpus");
    let announced = attached.and_then(|(_, element)| Some((element.text.trim().parse().ok()?, element.line)));
    let announced: Option<(u64, usize)> = announced;
    import.gpus = Some(children.len() as u64);
    match announced {
        Some((count, line)) => {
            import.count("attached_gpus", count as usize);
            if count > children.len() as u64 {
                let what = format!("{count} devices are attached, {} follow", children.len());
                import.lost(line, what);
            } else if count < children.len() as u64 {
                let what = format!("{count} devices are attached, but {} follow", children.len());
                import.problem(line, what);
            }
        }
        None => {
            import.counts.insert("attached_gpus".to_owned(), None);
            import.problem(xml.elements[0].line, "the number of attached devices is missing");
        }
    }
    if let Some((line, what)) = &xml.cut {
        import.lost(*line, what.clone());
    }
    // Only where every device is there is the order the index.
    let is_whole = announced.is_some_and(|(count, _)| count == children.len() as u64);
    for (index, position) in children.iter().take(GPUS_LIMIT).enumerate() {
        let facts = gpu(xml, *position, is_whole.then_some(index as u32));
        if facts.name.is_none() {
            import.lost(facts.line, "the device has no product name");
        }
        if facts.memory.is_none() {
            import.lost(facts.line, "the device has no amount of memory");
        }
        import.facts.host.gpus.push(facts);
    }
    if children.len() > GPUS_LIMIT {
        import.lost(xml.elements[0].line, format!("more than {GPUS_LIMIT} devices"));
    }
    import.facts.host.announced_gpus = announced;
    Ok(import)
}

fn gpu(xml: &Xml, position: usize, index: Option<u32>) -> GpuFacts {
    let element = &xml.elements[position];
    let text = |path: &[&str]| {
        xml.text_at(position, path)
            .filter(|text| !text.is_empty() && *text != "N/A")
    };
    let number = |path: &[&str]| text(path)?.trim_end_matches('x').parse::<u32>().ok();
    let link = ["pci", "pci_gpu_link_info"];
    let generation = number(&[link[0], link[1], "pcie_gen", "max_link_gen"]);
    let lanes = number(&[link[0], link[1], "link_widths", "max_link_width"]);
    GpuFacts {
        line: element.line,
        index,
        bus: element
            .attribute("id")
            .or_else(|| text(&["pci", "pci_bus_id"]))
            .and_then(bus),
        name: text(&["product_name"]).map(str::to_owned),
        pci_id: text(&["pci", "pci_device_id"]).and_then(packed_pci_id),
        memory: text(&["fb_memory_usage", "total"]).and_then(memory),
        slot: generation.zip(lanes),
        ..GpuFacts::default()
    }
}
